"""Writes safetensors files one tensor at a time, so that nobody has to hold them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from areal_flow.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

HEADER_ALIGNMENT = 64
"""Bytes; the first tensor begins at a multiple of it."""

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
"""What torch calls a type, by what safetensors calls it."""


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], file: BinaryIO, *, like: Mapping[str, Tensor]
) -> None:
    """Write a safetensors file of tensors that come one after the other, in any order."""
    import torch

    header, offsets = file_header(like)
    file.write(header)
    for name, tensor in tensors:
        file.seek(offsets[name])
        file.write(tensor.flatten().view(torch.uint8).numpy().data)
    file.truncate(len(header) + sum(tensor.nbytes for tensor in like.values()))


def file_header(
    like: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return a file's header and each tensor's offset; larger types first, so all are aligned."""
    described: dict[str, Any] = {}
    end = 0
    for name in sorted(like, key=lambda name: (-like[name].element_size(), name)):
        begin, end = end, end + like[name].nbytes
        described[name] = {
            "dtype": _dtype_name(name, like[name]),
            "shape": list(like[name].shape),
            "data_offsets": [begin, end],
        }
    beside = {"__metadata__": dict(metadata)} if metadata else {}
    header = json.dumps({**beside, **described}).encode()
    header += b" " * (-(8 + len(header)) % HEADER_ALIGNMENT)
    content = len(header).to_bytes(8, "little") + header
    return content, {name: len(content) + of["data_offsets"][0] for name, of in described.items()}


def _dtype_name(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    names = {of_torch: of_file for of_file, of_torch in DTYPES.items()}
    if dtype not in names:
        raise WeightsError(
            f"{name}: expected one of the types {', '.join(names)}, found {dtype}; convert it "
            "before it is staged"
        )
    return names[dtype]
