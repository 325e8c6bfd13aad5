"""While a cluster runs, its driver collects garbage quickly."""

from __future__ import annotations

import gc
from pathlib import Path

from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.worker_context import WorkerContext


async def test_garbage_collections_leave_out_what_was_there_before_the_cluster(
    tmp_path: Path,
) -> None:
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
