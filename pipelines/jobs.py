"""A run driven from its making, or its resumption, to its recorded end.

The command line and the Python API both start runs here. What a job prepares and computes is its
pipeline's; this module knows how a driver holds a run and how it leaves it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from areal_flow.config import Recipe, dump_recipe
from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.run_directory import create_run, hold_run, leave_run
from pipelines.stop_signals import Outcome

Result = TypeVar("Result")
Fill = Callable[[RunLayout, Recipe], Recipe]
"""Writes what a caller brought along into a new run directory; returns the recipe that names it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a command does with a run."""

    command: str
    prepare: Callable[[RunLayout, Recipe], None]
    drive: Callable[[RunLayout, Recipe, Writer, bool, float], Coroutine[Any, Any, Outcome]]
    prepared: Callable[[RunLayout], Path]
    """The last thing that a preparation writes."""


def start(
    job: Job, layout: RunLayout, recipe: Recipe, *, began: float, fill: Fill | None = None
) -> Outcome:
    """Make a run and drive it to its end.

    A mistake found in the preparation leaves nothing behind, so the name stays free.

    Args:
        began: `monotonic()` when the program began.

    Raises:
        RunError: the name is taken.
        ArealFlowError: the run ended with it, and its directory says so.
    """
    create_run(layout, recipe)
    with hold_run(layout) as writer:
        print(f"Run {layout.name} in {layout.root}", flush=True)
        try:
            if fill is not None:
                recipe = fill(layout, recipe)
                layout.config.write_text(dump_recipe(recipe))
            job.prepare(layout, recipe)
        except BaseException:
            shutil.rmtree(layout.root, ignore_errors=True)
            raise
        return _drive(job, layout, recipe, writer, resume=False, began=began)


def resume(
    job: Job, layout: RunLayout, recipe: Recipe, *, take_over: bool = False, began: float
) -> Outcome:
    """Drive a run that was made before to its end.

    Args:
        take_over: even if another driver holds the run; it hangs, or it will find itself refused.
        began: `monotonic()` when the program began.

    Raises:
        RunError: another driver holds it, or it was never prepared for this job.
        ArealFlowError: the run ended with it, and its directory says so.
    """
    if not job.prepared(layout).exists():
        raise RunError(
            f"expected a run that `areal-flow {job.command}` prepared in {layout.root}, found none "
            f"of its files: start a new one, or resume it with the command that made it"
        )
    with hold_run(layout, take_over=take_over) as writer:
        print(f"Run {layout.name} in {layout.root}", flush=True)
        return _drive(job, layout, recipe, writer, resume=True, began=began)


def _drive(
    job: Job, layout: RunLayout, recipe: Recipe, writer: Writer, *, resume: bool, began: float
) -> Outcome:
    how_to_go_on = (
        "Everything committed is safe. Continue with: "
        f"areal-flow {job.command} --resume {layout.name}"
    )
    try:
        outcome = wait_for(lambda: job.drive(layout, recipe, writer, resume, began))
    except BaseException as error:
        forced = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        state = "stopped" if forced else "failed"
        seconds = monotonic() - began
        leave_run(layout, writer, state, seconds=seconds, reason=str(error)[:500])  # type: ignore[arg-type]
        print(how_to_go_on, file=sys.stderr, flush=True)
        raise
    leave_run(
        layout,
        writer,
        "finished" if outcome.finished else "stopped",
        seconds=monotonic() - began,
        reason=outcome.stopped_by,
    )
    if not outcome.finished:
        print(how_to_go_on, flush=True)
    return outcome


def wait_for(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine to its end, in a thread of its own where an event loop runs already.

    A notebook's cell is on a running loop. An interrupt of the cell ends the work, too.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> Result:
        task = asyncio.current_task()
        assert task is not None
        loops.append((asyncio.get_running_loop(), task))
        return await work()

    with ThreadPoolExecutor(max_workers=1) as thread:
        running = thread.submit(asyncio.run, noted())
        try:
            return running.result()
        except KeyboardInterrupt:
            for loop, task in loops:
                loop.call_soon_threadsafe(task.cancel, "SIGINT")
            raise


async def _train(
    layout: RunLayout, recipe: Recipe, writer: Writer, resume: bool, began: float
) -> Outcome:
    from pipelines.train import run_training

    return await run_training(layout, recipe, writer=writer, resume=resume, began=began)


def _prepare_training(layout: RunLayout, recipe: Recipe) -> None:
    from pipelines.train import prepare_run

    prepared = prepare_run(layout, recipe)
    print(f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out", flush=True)
    if prepared.bad_rows:
        print(f"{len(prepared.bad_rows)} bad rows skipped, listed in {layout.bad_rows}:")
        for row in prepared.bad_rows[:5]:
            print(f"  {row}")


async def _fine_tune(
    layout: RunLayout, recipe: Recipe, writer: Writer, resume: bool, began: float
) -> Outcome:
    from pipelines.sft import run_sft

    return await run_sft(layout, recipe, writer=writer)


def _prepare_sft(layout: RunLayout, recipe: Recipe) -> None:
    from pipelines.sft import prepare_sft_run

    print(f"{prepare_sft_run(layout, recipe)} rows to learn from", flush=True)


TRAINING = Job("train", _prepare_training, _train, lambda layout: layout.steps)
SFT = Job("sft", _prepare_sft, _fine_tune, lambda layout: layout.sft_rows)
