"""Adds workers to a running pool and removes some of them, as a user asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from areal_flow.cluster.placement import WorkerPlacement, place_beside
from areal_flow.cluster.pool import WorkerPool
from areal_flow.errors import EngineError, RunError

ELASTIC_ROLES = ("generator", "reward")


async def add_to(pool: WorkerPool, role: str, num_workers: int) -> list[str]:
    """Start workers like the first of this role; return their names once they have joined.

    Raises:
        RunError: no such role, or it cannot grow.
        ConfigError: no GPU is free.
        EngineError: a process did not start; then none of them stays.
    """
    if role not in ELASTIC_ROLES:
        raise RunError(f"expected a role of {', '.join(ELASTIC_ROLES)}, found {role!r}")
    if num_workers < 1:
        raise RunError(f"expected to add 1 worker or more, found {num_workers}")
    placed = [m.placement for m in pool.registry.all() if m.placement and m.is_expected]
    added: list[WorkerPlacement] = []
    for _ in range(num_workers):
        name = _free_name(pool, role, [placement.name for placement in added])
        like = replace(pool.registry.first(role), name=name)
        added.append(place_beside(like, [*placed, *added], pool.machines))
    try:
        await pool.start_until_joined(added)
    except EngineError:
        for placement in added:
            record = pool.registry.named(placement.name)
            if record is not None:
                await pool.retire(record)
        raise
    return [placement.name for placement in added]


async def remove_from(pool: WorkerPool, name: str) -> None:
    """Retire a worker: finished results move to others, its tasks run again elsewhere.

    Raises:
        RunError: there is none of that name, or the run needs this one.
    """
    record = pool.registry.named(name)
    if record is None:
        known = ", ".join(m.name for m in pool.registry.all() if m.is_expected)
        raise RunError(f"expected the name of a worker, found {name!r}; there are: {known}")
    if record.role == "trainer":
        raise RunError(f"{name} trains and cannot be removed; stop the run instead")
    others = [m for m in pool.registry.present(record.role) if m is not record]
    if record.role and not others:
        raise RunError(
            f"{name} is the last {record.title} of this run and cannot be removed; add "
            "another first"
        )
    await pool.retire(record)


def _free_name(pool: WorkerPool, role: str, also_taken: Sequence[str]) -> str:
    taken = {m.name for m in pool.registry.all()} | set(map(str, pool.scheduler.aliases))
    return next(n for i in count() if (n := f"{role}-{i}") not in {*taken, *also_taken})
