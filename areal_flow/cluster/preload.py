"""Prepares a worker process before its first task; Dask imports this module by its name.

Buffers of Arrow tables that came over the network start anywhere, and Lance panics on misaligned
data (with a `PanicException`, which is a `BaseException`). The deserializer that is registered here
aligns them on arrival, and copies only what needs it.
"""

from __future__ import annotations

import os
from typing import Any

import distributed.protocol.arrow
import pyarrow as pa
from distributed import Worker
from distributed.protocol.serialize import dask_deserialize

assert distributed.protocol.arrow  # registers first, so that ours replaces it


@dask_deserialize.register(pa.Table)
def deserialize_aligned_table(header: dict[str, Any], frames: list[Any]) -> pa.Table:
    """Rebuild a table whose buffers are aligned for their types."""
    options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
    with pa.ipc.open_stream(pa.BufferReader(frames[0]), options=options) as reader:
        return reader.read_all()


def dask_setup(worker: Worker) -> None:
    """Leave the driver's process group.

    A Ctrl-C at a terminal reaches every process of that group, while it is the driver that ends the
    workers, once their step is done. To ignore the signal is not enough: polars listens for it
    during a query.
    """
    os.setpgrp()
