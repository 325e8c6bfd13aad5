"""A run driven from its making, or its resumption, to its recorded end.

The command line and the Python API both start runs here. What a job prepares and computes is its
pipeline's; this module knows how a driver holds a run and how it leaves it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from areal_flow.config import Recipe, dump_recipe
from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.recovery.inputs import Verifier, accept, check_inputs
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.run_directory import State, create_run, hold_run, leave_run
from pipelines.preflight import check_devices, try_verifiers
from pipelines.sft import prepare_sft_run, run_sft
from pipelines.stop_signals import Outcome, wait_for
from pipelines.train import found_verifier, prepare_run, run_training


@dataclass(frozen=True, slots=True)
class Job:
    """What a command does with a run."""

    command: str
    prepare: Callable[[RunLayout, Recipe], str]
    """Writes what a new run needs; returns what there is to say of it."""
    drive: Callable[..., Coroutine[Any, Any, Outcome]]
    prepared: Callable[[RunLayout], Path]
    """The last thing that a preparation writes."""
    verifier: Callable[[RunLayout, Recipe], Verifier]
    """Says which code scores, as it is now."""


def _prepare_training(layout: RunLayout, recipe: Recipe) -> str:
    return "\n  ".join([prepare_run(layout, recipe), *try_verifiers(layout, recipe)])


TRAINING = Job(
    "train", _prepare_training, run_training, lambda layout: layout.steps, found_verifier
)
SFT = Job("sft", prepare_sft_run, run_sft, lambda layout: layout.sft_rows, lambda *_: Verifier())


def start(
    job: Job,
    layout: RunLayout,
    recipe: Recipe,
    *,
    began: float,
    fill: Callable[[RunLayout, Recipe], Recipe] = lambda layout, recipe: recipe,
) -> Outcome:
    """Make a run and drive it to its end.

    A mistake found in the preparation leaves nothing behind, so the name stays free.

    Args:
        began: `monotonic()` when the program began.
        fill: writes what a caller brought along into the new run directory; returns the recipe
            that names it.

    Raises:
        RunError: the name is taken.
        ArealFlowError: the run ended with it, and its directory says so.
    """
    check_devices(recipe)
    create_run(layout, recipe)
    with hold_run(layout) as writer:
        try:
            recipe = fill(layout, recipe)
            layout.config.write_text(dump_recipe(recipe))
            print(f"Run {layout.name} in {layout.root}: {job.prepare(layout, recipe)}", flush=True)
        except BaseException:
            shutil.rmtree(layout.root, ignore_errors=True)
            raise
        return _drive(job, layout, recipe, writer, resume=False, began=began)


def resume(
    job: Job,
    layout: RunLayout,
    recipe: Recipe,
    *,
    take_over: bool = False,
    accept_verifier: bool = False,
    began: float,
) -> Outcome:
    """Drive a run that was made before to its end.

    Args:
        take_over: even if another driver holds the run; it hangs, or it will find itself refused.
        accept_verifier: even if the code that scores is not that of the run.
        began: `monotonic()` when the program began.

    Raises:
        RunError: another driver holds it, it was never prepared for this job, or what it is made
            of changed.
        ArealFlowError: the run ended with it, and its directory says so.
    """
    if not job.prepared(layout).exists():
        raise RunError(
            f"expected a run that `areal-flow {job.command}` prepared in {layout.root}, found none "
            f"of its files: start a new one, or resume it with the command that made it"
        )
    check_devices(recipe)
    verifier = job.verifier(layout, recipe)
    notes = check_inputs(layout, verifier, accept_verifier=accept_verifier)
    with hold_run(layout, take_over=take_over) as writer:
        accept(layout, verifier, writer)
        print("\n".join([f"Run {layout.name} in {layout.root}", *notes]), flush=True)
        return _drive(job, layout, recipe, writer, resume=True, began=began)


def _drive(
    job: Job, layout: RunLayout, recipe: Recipe, writer: Writer, *, resume: bool, began: float
) -> Outcome:
    state: State = "failed"
    try:
        outcome = wait_for(
            lambda: job.drive(layout, recipe, writer=writer, resume=resume, began=began)
        )
        state, reason = "finished" if outcome.finished else "stopped", outcome.stopped_by
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            state = "stopped"
        reason = str(error)[:500]
        raise
    finally:
        leave_run(layout, writer, state, seconds=monotonic() - began, reason=reason)
        if state != "finished":
            again = f"areal-flow {job.command} --resume {layout.name}"
            said = f"Everything committed is safe. Continue with: {again}"
            print(said, file=sys.stderr, flush=True)
    return outcome
