"""Arrow tables between workers, aligned on arrival. Imported in every process of a cluster.

Buffers that came over a comm start anywhere, and Lance panics on misaligned data (with a
`PanicException`, which is a `BaseException`); reading with an alignment copies only what needs it.
"""

from __future__ import annotations

from typing import Any

import distributed.protocol.arrow
import pyarrow as pa
from distributed.protocol.serialize import dask_deserialize

assert distributed.protocol.arrow  # registers first, so that ours replaces it


@dask_deserialize.register(pa.Table)
def deserialize_aligned_table(header: dict[str, Any], frames: list[Any]) -> pa.Table:
    """Rebuild a table whose buffers are aligned for their types."""
    options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
    with pa.ipc.open_stream(pa.BufferReader(frames[0]), options=options) as reader:
        return reader.read_all()
