"""Hashes of each trajectory row what a step depends on; the hash is stored in the row itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from areal_flow.core.digests import row_hash

CONTENT_COLUMNS = (
    "trajectory_id",
    "prompt_tokens",
    "output_tokens",
    "behavior_logprobs",
    "loss_mask",
    "version_spans",
    "reward",
)


def content_hashes(table: pa.Table) -> list[str]:
    """Return the `content_hash` of each row, 32 hexadecimal digits, from `CONTENT_COLUMNS`."""
    return [
        row_hash(parts)
        for batch in table.select(CONTENT_COLUMNS).to_batches()
        for parts in zip(*map(_bytes_of_rows, batch.columns), strict=True)
    ]


def row_arrays(column: pa.ListArray | pa.ChunkedArray) -> Iterator[NDArray[Any]]:
    """Yield each row's values, of structs the fields side by side: views, but for booleans."""
    for chunk in getattr(column, "chunks", [column]):
        flat, offsets = _flat(chunk.flatten()), chunk.offsets.to_numpy()
        for begin, end in pairwise((offsets - offsets[0]).tolist()):
            yield flat[begin:end]


def _bytes_of_rows(column: pa.Array) -> Iterator[bytes]:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return (text.encode() for text in column.to_pylist())
    if not pa.types.is_nested(column.type):
        return (b"" if value is None else repr(value).encode() for value in column.to_pylist())
    return (row.tobytes() for row in row_arrays(column))


def _flat(values: pa.Array) -> NDArray[Any]:
    if pa.types.is_struct(values.type):
        return np.stack([_flat(field) for field in values.flatten()], axis=1)
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return flat
