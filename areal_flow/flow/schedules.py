"""Decides when each stage of the flow runs: two policies over the same stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, TypeVar

from areal_flow.config import Recipe
from areal_flow.flow.flow import Flow

Result = TypeVar("Result")


async def run_async_schedule(flow: Flow) -> None:
    """Generate and train at the same time, at most `max_staleness` versions apart (the default)."""
    await run_until_first_ends(
        _train_until_done(flow), _keep_admitting(flow), _keep_committing(flow)
    )


async def run_barrier_schedule(flow: Flow) -> None:
    """Generate one batch, wait for its last completion, train, load the weights, repeat.

    With `exact_staleness` N, version 0 generates N + 1 batches; each later version generates one,
    behind the N that wait.
    """
    await run_until_first_ends(_alternate_until_done(flow), _keep_committing(flow))


SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}
"""By `schedule` of a recipe."""


def schedule_of(recipe: Recipe) -> Callable[[Flow], Coroutine[Any, Any, None]]:
    """Return a recipe's schedule; batches of an exact age need the barrier between the stages."""
    is_exact = recipe.controller.exact_staleness is not None
    return run_barrier_schedule if is_exact else SCHEDULES[recipe.schedule]


async def _train_until_done(flow: Flow) -> None:
    while await _train_next(flow):
        pass


async def _alternate_until_done(flow: Flow) -> None:
    trained = True
    while trained and not flow.done():
        await _generate_batch(flow)
        trained = await _train_next(flow)
        await flow.wait_until_released()


async def _train_next(flow: Flow) -> bool:
    began = monotonic()
    batch = await flow.wait_for_batch()
    if batch is None:
        return False
    await flow.train(batch, wait_s=monotonic() - began)
    return True


async def _keep_admitting(flow: Flow) -> None:
    while True:
        seen = flow.num_changes
        while flow.gate.admits_group(num_ready=flow.num_ready):
            flow.submit()
        await flow.wait_for_change(seen)


async def _keep_committing(flow: Flow) -> None:
    while True:
        seen = flow.num_changes
        await flow.commit_written()
        await flow.wait_for_change(seen)


async def _generate_batch(flow: Flow) -> None:
    num_batches = 1 + (flow.recipe.controller.exact_staleness or 0)
    num_groups = num_batches * flow.recipe.groups_per_step
    while not flow.done():
        seen = flow.num_changes
        unaccounted = num_groups - len(flow.buffer) - flow.num_pending_groups
        for _ in range(unaccounted):
            flow.submit()
        if not flow.num_pending_groups:
            return
        await flow.wait_for_change(seen)


async def run_until_first_ends(*stages: Coroutine[Any, Any, Result]) -> Result:
    """Run stages together until one ends; cancel the others; return its result or raise its error.

    The error is raised even if a signal cancels this call while the other stages end.
    """
    tasks = [asyncio.create_task(stage) for stage in stages]
    cancelled = None
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        try:
            await _cancel(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    results = [task.result() for task in tasks if task in ended]
    if cancelled is not None:
        raise cancelled
    return results[0]


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
