"""Weights through this machine's shared memory: a directory's versions, as segments in /dev/shm.

    weights/00000002 -> /dev/shm/areal-flow-DEVICE-INODE-00000002/00000012/{model.safetensors, hash}

The link is made before the segments, so a successor frees what a crash has left. Their name follows
from the run directory itself: that of a copied run leads to no other run's segments.

New pages cost twice what copying into old ones does, so a version that is retired is written again.
A reader maps a version and holds a lock on it for as long as any of its tensors lives; a segment
that is locked is left to its readers, and the writer takes new pages. The kernel frees the locks of
a process that dies.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from areal_flow.core.errors import StorageError
from areal_flow.policy.checkpoints import MODEL_FILE
from areal_flow.policy.weights.directory import (
    HASH_FILE,
    DirectoryReader,
    DirectoryWriter,
    HeldWeights,
    published,
    staged,
)
from areal_flow.policy.weights.tensor_file import DTYPES, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


def segments_of(root: Path) -> Path:
    run = root.parent.stat()
    return SHARED_MEMORY / f"areal-flow-{run.st_dev:x}-{run.st_ino:x}-{root.name}"


def create_segments(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    segments = segments_of(root)
    shutil.rmtree(segments, ignore_errors=True)  # of a directory that was removed by hand
    root.symlink_to(segments)


def _require_own(segments: Path) -> None:
    """Make the directory of segments unless it is there; other users may write around it."""
    with suppress(FileExistsError):
        segments.mkdir(mode=0o700)
    status = segments.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StorageError(
            f"{segments}: expected a directory of user {os.geteuid()}, found a link or one of user "
            f"{status.st_uid}: weights would go there. Have it removed, or set weights.medium to "
            "'directory'"
        )


def free_segments(root: Path) -> None:
    if root.is_symlink():
        shutil.rmtree(segments_of(root), ignore_errors=True)
        root.unlink(missing_ok=True)


def available_bytes() -> int:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0
    return min(free, int(psutil.virtual_memory().available))


class SharedMemoryReader(DirectoryReader):
    """A `WeightsReader` whose tensors are views of the segment that they were published in."""

    def __init__(self, root: Path) -> None:
        super().__init__(segments_of(root))

    def _tensors(self, version: int) -> dict[str, Tensor]:
        return map_tensors(published(self.root, version) / MODEL_FILE)

    def _hold(self, weights: HeldWeights) -> None:
        """Keep nothing: a version that is held would keep its pages."""


class SharedMemoryWriter(DirectoryWriter):
    """A `WeightsWriter` that writes a version into the pages of one that is retired."""

    def __init__(self, root: Path) -> None:
        super().__init__(segments_of(root))

    def _prepare(self, directory: Path) -> None:
        _require_own(self.root)
        for reusable in [*self.root.glob(".staged-*"), *self.root.glob(".spare-*")]:
            if reusable != directory and directory.exists():
                shutil.rmtree(reusable)
            else:
                reusable.rename(directory)
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / HASH_FILE).unlink(missing_ok=True)  # first: from here on it is not whole

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        with os.fdopen(_own_pages(staged(self.root, version) / MODEL_FILE), "wb") as segment:
            write_tensors(tensors, segment, like=like)

    def _retire(self, directory: Path) -> None:
        if next(self.root.glob(".spare-*"), None) is None:
            directory.rename(self.root / f".spare-{directory.name}")
        else:
            super()._retire(directory)


def map_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file where they lie; nobody writes there meanwhile."""
    import torch

    with file.open("rb") as segment:
        fcntl.flock(segment, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(segment.fileno()), file.stat()):
            raise FileNotFoundError(f"{file} was retired while it was opened")
        # The mapping has the descriptor that it was made of, and with it the lock.
        mapped = mmap.mmap(segment.fileno(), 0, access=mmap.ACCESS_COPY)
    num_header_bytes = int.from_bytes(mapped[:8], "little")
    described = json.loads(mapped[8 : 8 + num_header_bytes])
    tensors = {}
    for name, of in described.items():
        begin, end = of["data_offsets"]
        dtype = getattr(torch, DTYPES[of["dtype"]])
        count, offset = (end - begin) // dtype.itemsize, 8 + num_header_bytes + begin
        values = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=dtype)  # `frombuffer` refuses an empty tensor
        )
        tensors[name] = values.view(of["shape"])
    return tensors


def _own_pages(file: Path) -> int:
    """Return a descriptor of a file that no reader has, locked: this one, else a new one."""
    with suppress(BlockingIOError):
        return _locked(file)
    file.unlink()  # its readers keep it
    return _locked(file)


def _locked(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
