"""Safetensors files: written one tensor at a time, read in place, shown to another process."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import finalize

import numpy as np

from areal_flow.core.errors import WeightsError
from areal_flow.core.machine import copying_threads

if TYPE_CHECKING:
    from torch import Tensor

HEADER_ALIGNMENT = 64
"""In bytes; the first tensor begins at a multiple of it."""

PIECE_BYTES = 1 << 24
"""That a thread copies at once."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch's names of types, by those of safetensors."""


class MappedPages:
    """The pages of files in memory that are written again and again, mapped once."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, Any]] = []
        """An open descriptor of each file, and its bytes."""

    def of(self, file: BinaryIO, num_bytes: int) -> Any:
        """Return a file's bytes, as an array to write to; the file gets this size."""
        self._forget_removed()
        for descriptor, pages in self._mapped:
            if os.path.sameopenfile(descriptor, file.fileno()) and len(pages) == num_bytes:
                return pages
        # Of its own: a mapping keeps a copy of the descriptor, and with it the lock of `file`.
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
        os.ftruncate(descriptor, num_bytes)
        # Without room for its pages, writing to a mapped file would kill this process.
        os.posix_fallocate(descriptor, 0, num_bytes)
        pages = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        self._mapped.append((descriptor, pages))
        return pages

    def _forget_removed(self) -> None:
        kept = []
        for descriptor, pages in self._mapped:
            if os.fstat(descriptor).st_nlink and os.fstat(descriptor).st_size == len(pages):
                kept.append((descriptor, pages))
            else:
                os.close(descriptor)
        self._mapped = kept


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    file: BinaryIO,
    *,
    like: Mapping[str, Tensor],
    pages: MappedPages | None = None,
) -> None:
    """Write tensors as they come, in any order; `like` has their names, types and shapes.

    Args:
        pages: of files in memory, into which several threads copy.
    """
    header, offsets = file_header(like)
    num_bytes = len(header) + sum(tensor.nbytes for tensor in like.values())
    if pages is not None:
        mapped = pages.of(file, num_bytes)
        mapped[: len(header)] = np.frombuffer(header, np.uint8)
        _copy_into_pages(tensors, mapped, offsets)
        return
    file.write(header)
    for name, tensor in tensors:
        file.seek(offsets[name])
        file.write(_bytes_of(tensor).data)
    file.truncate(num_bytes)


def _copy_into_pages(
    tensors: Iterable[tuple[str, Tensor]], mapped: Any, offsets: Mapping[str, int]
) -> None:
    with ThreadPoolExecutor(copying_threads()) as threads:
        for name, tensor in tensors:
            content = _bytes_of(tensor)
            target = mapped[offsets[name] : offsets[name] + len(content)]
            pieces = [slice(at, at + PIECE_BYTES) for at in range(0, len(content), PIECE_BYTES)]
            copied = [threads.submit(np.copyto, target[each], content[each]) for each in pieces]
            for each in copied:
                each.result()


def _bytes_of(tensor: Tensor) -> Any:
    import torch

    return tensor.flatten().view(torch.uint8).numpy()


def file_header(
    like: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return a file's header and each tensor's offset; larger types first, so all are aligned."""
    file_names = {torch_name: file_name for file_name, torch_name in DTYPES.items()}
    entries: dict[str, Any] = {}
    end = 0
    for name in sorted(like, key=lambda name: (-like[name].element_size(), name)):
        begin, end = end, end + like[name].nbytes
        dtype = str(like[name].dtype).removeprefix("torch.")
        if dtype not in file_names:
            raise WeightsError(
                f"{name}: expected one of the types {', '.join(file_names)}, found {dtype}; "
                "convert it before it is staged"
            )
        entries[name] = {
            "dtype": file_names[dtype],
            "shape": list(like[name].shape),
            "data_offsets": [begin, end],
        }
    extra = {"__metadata__": dict(metadata)} if metadata else {}
    header = json.dumps({**extra, **entries}).encode()
    header += b" " * (-(8 + len(header)) % HEADER_ALIGNMENT)
    content = len(header).to_bytes(8, "little") + header
    offsets = {name: len(content) + entry["data_offsets"][0] for name, entry in entries.items()}
    return content, offsets


class MappedTensors(dict[str, "Tensor"]):
    """Views of a file's tensors, which keep it locked: nobody writes to it meanwhile."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        """Of the file, also once it has another name or none; closed with the last reference."""
        finalize(self, os.close, descriptor)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that is in the file, perhaps under another name."""
        return self._names.get(_place(tensor))

    @cached_property
    def _names(self) -> dict[Any, str]:
        return {_place(tensor): name for name, tensor in self.items() if tensor.nbytes}


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def map_tensors(file: Path) -> MappedTensors:
    import torch

    tensors = MappedTensors(os.open(file, os.O_RDONLY))
    fcntl.flock(tensors.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(tensors.descriptor), file.stat()):
        raise FileNotFoundError(f"{file} was retired while it was opened")
    # The mapping keeps a copy of the descriptor, and with it the lock.
    mapped = mmap.mmap(tensors.descriptor, 0, access=mmap.ACCESS_COPY)
    num_header_bytes = int.from_bytes(mapped[:8], "little")
    entries = json.loads(mapped[8 : 8 + num_header_bytes])
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype = getattr(torch, DTYPES[entry["dtype"]])
        count, offset = (end - begin) // dtype.itemsize, 8 + num_header_bytes + begin
        values = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=dtype)  # `frombuffer` refuses an empty tensor
        )
        tensors[name] = values.view(entry["shape"])
    return tensors


SharedFile = tuple[str, Mapping[str, str]]
"""A file's path, and by the name of each tensor in it that is shown, its name there."""


@contextmanager
def shared_files(
    tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]
) -> Iterator[Sequence[SharedFile]]:
    """Yield files in which another process of this machine finds tensors during the block.

    What is part of a mapped file is read there; the rest is copied into a file in memory.

    Args:
        source: where the tensors come from.
    """
    files: list[SharedFile] = []
    rest = dict(tensors)
    if isinstance(source, MappedTensors):
        names = {name: source.name_of(tensor) for name, tensor in tensors.items()}
        in_source = {name: named for name, named in names.items() if named is not None}
        files.append((_path_of(source.descriptor), in_source))
        rest = {name: tensor for name, tensor in tensors.items() if name not in in_source}
    if not rest:
        yield files
        return
    with os.fdopen(os.memfd_create("areal-flow-weights"), "wb") as segment:
        contiguous = {name: tensor.contiguous() for name, tensor in rest.items()}
        write_tensors(contiguous.items(), segment, like=contiguous)
        segment.flush()
        yield [*files, (_path_of(segment.fileno()), {name: name for name in rest})]


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def read_shared_files(files: Sequence[SharedFile]) -> dict[str, Tensor]:
    """Return the tensors that another process shows by `shared_files`, as views."""
    tensors = dict[str, Any]()
    for path, names in files:
        mapped = map_tensors(Path(path))
        tensors |= {name: mapped[source] for name, source in names.items()}
    return tensors
