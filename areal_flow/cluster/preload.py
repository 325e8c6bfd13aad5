"""What a worker process does before its first task. Dask imports this by name.

A Ctrl-C at a terminal reaches every process of the driver's group. What it means is the driver's to
decide, who ends the workers when their step is done: so they form groups of their own. (To ignore
the signal is not enough: polars listens for it during a query.)
"""

from __future__ import annotations

import os

from distributed import Worker

from areal_flow.cluster import serialization

assert serialization  # imported for the deserializer that it registers


def dask_setup(worker: Worker) -> None:
    """Leave the driver's process group."""
    os.setpgrp()
