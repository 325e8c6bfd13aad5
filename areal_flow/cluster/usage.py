"""What a run's processes use, from the heartbeats of its workers: MLflow's system metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.rollouts import HELD_OUT
from areal_flow.log.ledger_row import REWARD_TASKS, SYSTEM_AREA


def usage(pool: WorkerPool) -> dict[str, float]:
    roles = {record.address: record.role for record in pool.registry.all()}
    workers = pool.scheduler.workers.values()
    used = [(roles[each.address], each.metrics) for each in workers if each.address in roles]
    tasks = (t for t in pool.scheduler.task_prefixes.values() if t.name[:7] == "reward/")
    worked_s = sum(t.all_durations["compute"] for t in tasks if t.name[7:] != HELD_OUT)
    metrics = usage_by_role([*used, ("driver", pool.scheduler.monitor.recent())])
    return {**metrics, REWARD_TASKS: worked_s}


def usage_by_role(processes: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return sums over the processes of each role; 100% is one core, or one GPU.

    Args:
        processes: the role of each, and its last heartbeat as Dask has it: `cpu` in percent,
            `memory` in bytes, and where NVML is installed `gpu`.
    """
    metrics: Counter[str] = Counter()
    for role, beat in processes:
        used = {"cpu_utilization_percentage": beat.get("cpu", 0.0)}
        used["memory_usage_megabytes"] = beat.get("memory", 0) / 1e6
        if device := beat.get("gpu"):
            used["gpu_utilization_percentage"] = device["utilization"]
            used["gpu_memory_usage_megabytes"] = device["memory-used"] / 1e6
        metrics.update({f"{SYSTEM_AREA}{role}_{name}": value for name, value in used.items()})
    return dict(metrics)
