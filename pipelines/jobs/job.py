"""A run driven from its making, or its resumption, to its recorded end.

The command line and the Python API both start runs here. What a job prepares and computes is its
pipeline's; this module knows how a driver holds a run and how it leaves it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from areal_flow.cluster.launchers.fork_server import ForkServer, start_fork_server
from areal_flow.cluster.placement import WorkerPlacement, place_workers
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.config.messages import spell
from areal_flow.core.command import command, from_here
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import ConfigError, EpisodeError, RewardError, RunError
from areal_flow.core.failures import first_line
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.directory import State, create_run, hold_run, leave_run, removed_on_failure
from areal_flow.log.inputs import Verifier, accept, check_inputs
from areal_flow.rewards.shipping import what_is_executed
from areal_flow.tracking.registry import show_report, track
from areal_flow.training.supervised import OBJECTIVES
from pipelines.console.run_log import log, log_kept, say
from pipelines.jobs.forking import Fork
from pipelines.jobs.preflight import check_devices, found_verifier
from pipelines.jobs.prepare import prepare_training
from pipelines.jobs.sft import prepare_sft_run, run_sft, sft_workers
from pipelines.jobs.stop_signals import Outcome, is_loop_running, raised_as_interrupts, wait_for
from pipelines.jobs.train import run_training
from pipelines.models import newest_checkpoint

RECIPES = Path(__file__).parent.parent / "recipes"
DEFAULT_RECIPE = RECIPES / "arithmetic.toml"
MAY_CHANGE = ("num_steps", "max_minutes")
"""Settings that a resume may change."""
_BUCKET = re.compile(r"s3://[^/\s]+(/\S+)?")
_ACCEPT = (
    "\nIf you change the verifier or agent before resuming, add --accept-verifier (in Python "
    "accept_verifier=True); without it the resume is refused."
)
_TIME_OF_NAME = re.compile(r"-\d{8}-\d{6}$")

logger = logging.getLogger(__name__)


def recipe_path(given: Path) -> Path:
    if given.is_file():
        return given
    shipped = {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}
    if str(given) not in shipped:
        names = ", ".join(shipped)
        raise ConfigError(f"expected a recipe at {given} or one of {names}, found no such file")
    return shipped[str(given)]


def chosen_recipe(
    given: Recipe | Path | str | Fork | None, over: dict[str, Any], *, spelling: str = "{}"
) -> tuple[str, Recipe]:
    """Return what a recipe is called, and it with settings over it."""
    match given:
        case Fork():
            return given.parent.name, given.recipe(over, spelling=spelling)
        case Path() | str():
            path = recipe_path(Path(given))
            return path.stem, load_recipe(path, over, spelling=spelling)
        case Recipe() | None:
            table = given.model_dump(mode="json") if given else {}
            return "python", build_recipe(table, over, source="the recipe given")
    raise ConfigError(
        f"expected a recipe as a path or a Recipe, found {type(given).__name__}: give "
        "settings as keywords, train(**settings)"
    )


def default_name(stem: str) -> str:
    return f"{_TIME_OF_NAME.sub('', stem)}-{datetime.now():%Y%m%d-%H%M%S}"


@dataclass(frozen=True, slots=True)
class Job:
    """What a command does with a run."""

    command: str
    prepare: Callable[[RunLayout, Recipe], str]
    """Writes what a new run needs; returns what there is to say of it."""
    drive: Callable[..., Coroutine[Any, Any, Outcome]]
    workers: Callable[[Recipe], list[WorkerPlacement]]
    """What `drive` starts."""
    prepared: Callable[[RunLayout], Path]
    """The last thing that a preparation writes."""
    verifier: Callable[[RunLayout, Recipe], Verifier]
    """Says which code scores, as it is now."""
    conclude: Callable[[RunLayout], None]
    """Called with a run that is finished, and recorded as such."""


def _draw_report(layout: RunLayout) -> None:
    from pipelines.pages.report import write_report

    try:
        path = write_report(layout)
    except Exception:
        again = command("report", layout.name, runs=layout.root.parent)
        logger.exception("%s could not be drawn: try %s", layout.name, again)
    else:
        say("", f"The run on one page: {path}")
        _deliver(layout, partial(show_report, layout, load_recipe(layout.config)))


def _deliver(layout: RunLayout, deliver: Callable[[], object]) -> None:
    """Deliver something of a finished run; a tracker that is away gets it later."""
    try:
        deliver()
    except Exception as error:  # noqa: BLE001  the run is finished all the same
        again = command("track", layout.name, runs=layout.root.parent)
        logger.warning("the tracker is away; deliver by %s: %s", again, first_line(error))


def _conclude_sft(layout: RunLayout) -> None:
    recipe, runs = load_recipe(layout.config), layout.root.parent
    if recipe.tracking.enabled:
        _deliver(layout, partial(track, layout.root, recipe.tracking.uri))
    if not OBJECTIVES[recipe.sft.objective].makes_reward_model:
        model = "--model", from_here(newest_checkpoint(layout)), "--sft.num-steps", 0
        further = command("train", from_here(layout.config), *model, runs=runs)
        say(f"Train it further with: {further}")
    say(f"Export it with: {command('export', layout.name, 'DIRECTORY', runs=runs)}")


TRAINING = Job(
    "train",
    prepare=prepare_training,
    drive=run_training,
    workers=place_workers,
    prepared=lambda layout: layout.steps,
    verifier=found_verifier,
    conclude=_draw_report,
)
SFT = Job(
    "sft",
    prepare=prepare_sft_run,
    drive=run_sft,
    workers=sft_workers,
    prepared=lambda layout: layout.sft_rows,
    verifier=lambda *_: Verifier(),
    conclude=_conclude_sft,
)


def recipe_to_resume(
    layout: RunLayout, overrides: dict[str, Any], *, spelling: str = "{}"
) -> Recipe:
    if set(overrides) - set(MAY_CHANGE):
        may_change = " and ".join(spell(name, spelling) for name in MAY_CHANGE)
        raise ConfigError(f"a resumed run keeps its recipe; only {may_change} may change")
    table = load_recipe(layout.config).model_dump(mode="json")
    return build_recipe(table, overrides, source=str(layout.config), spelling=spelling)


def url_of_datasets(folder: str, name: str) -> str:
    """Return where a run's datasets are made in an object store."""
    if not _BUCKET.fullmatch(folder):
        raise ConfigError(
            f"--datasets: expected s3://BUCKET/FOLDER, found {folder!r}; credentials and a region "
            "or an endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT"
        )
    return f"{folder.rstrip('/')}/{name}"


def supervised(objective: str) -> Job:
    return replace(SFT, command=objective.replace("_", "-"))


def start(
    job: Job,
    layout: RunLayout,
    recipe: Recipe,
    *,
    began: float,
    recipe_name: str = "",
    fill: Callable[[RunLayout, Recipe], Recipe] = lambda layout, recipe: recipe,
    fork: Fork | None = None,
    datasets: str = "",
) -> Outcome:
    """Make a run and drive it to its end; a mistake found in the preparation leaves nothing behind.

    Args:
        began: `monotonic()` when the program began.
        fill: writes what a caller brought along into the new run directory; returns the recipe
            that names it.
        datasets: the folder of an object store for the run's datasets; "": in its directory.
    """
    check_devices(recipe)
    url = url_of_datasets(datasets, layout.name) if datasets else ""
    create_run(layout, recipe, recipe_name=recipe_name)
    with raised_as_interrupts(), ExitStack() as held:
        with removed_on_failure(layout):
            if url:
                layout.datasets_url.write_text(url)
            writer = held.enter_context(hold_run(layout))
            fork_server = held.enter_context(start_fork_server(job.workers(recipe)))
            recipe = fill(layout, recipe)
            if fork is not None:
                recipe = fork.begin(layout, recipe, writer)
            layout.config.write_text(dump_recipe(recipe))
            prepared = job.prepare(layout, recipe)
            recipe = load_recipe(layout.config)  # a preparation may settle what it leaves open
        with log_kept(layout.log):
            say(f"Run {layout.name} in {layout.root}: {prepared}")
            return _drive(job, layout, recipe, writer, fork_server, resume=False, began=began)


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
    """
    if not job.prepared(layout).exists():
        raise RunError(
            f"expected a run that `areal-flow {job.command}` prepared in {layout.root}, found none "
            f"of its files: start a new one, or resume it with the command that made it"
        )
    check_devices(recipe)
    if executed := what_is_executed(each.verifier for each in recipe.rewards):
        say(executed)
    verifier = job.verifier(layout, recipe)
    notes = check_inputs(layout, verifier, accept_verifier=accept_verifier)
    with (
        raised_as_interrupts(),
        hold_run(layout, take_over=take_over) as writer,
        start_fork_server(job.workers(recipe)) as fork_server,
        log_kept(layout.log),
    ):
        accept(layout, verifier, writer)
        _record_num_steps(layout, recipe.num_steps)
        log("")
        say(f"Run {layout.name} in {layout.root}, resumed by driver {writer.writer_epoch}", *notes)
        return _drive(job, layout, recipe, writer, fork_server, resume=True, began=began)


def _record_num_steps(layout: RunLayout, num_steps: int) -> None:
    """Let reports, workers and the next resume know how many steps the run has now."""
    recorded = load_recipe(layout.config)
    if recorded.num_steps != num_steps:
        changed = recorded.model_copy(update={"num_steps": num_steps})
        replace_file(layout.config, dump_recipe(changed))


def _drive(
    job: Job,
    layout: RunLayout,
    recipe: Recipe,
    writer: Writer,
    fork_server: ForkServer,
    *,
    resume: bool,
    began: float,
) -> Outcome:
    state: State = "failed"
    is_of_user_code = False
    drive = partial(
        job.drive,
        layout,
        recipe,
        writer=writer,
        fork_server=fork_server,
        resume=resume,
        began=began,
    )
    try:
        outcome = wait_for(drive)
        state, reason = "finished" if outcome.finished else "stopped", outcome.stopped_by
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            state = "stopped"
        reason = str(error)[:500]
        is_of_user_code = isinstance(error, RewardError | EpisodeError)
        log(f"{type(error).__name__}: {error}")
        raise
    finally:
        leave_run(layout, writer, state, seconds=monotonic() - began, reason=reason)
        if state != "finished":
            message = f"Everything committed is safe. Continue with: {_resumption(job, layout)}"
            if is_of_user_code:
                message += _ACCEPT
            # A notebook shows standard error in red, as a failure.
            print(message, file=sys.stdout if is_loop_running() else sys.stderr, flush=True)
            log(message)
    if outcome.finished:
        job.conclude(layout)
    return outcome


def _resumption(job: Job, layout: RunLayout) -> str:
    runs = layout.root.parent
    if job.command == TRAINING.command and is_loop_running():
        where = "" if runs == Path("runs").resolve() else f", runs={str(runs)!r}"
        return f"areal_flow.train(resume={layout.name!r}{where})"
    return command(job.command, "--resume", layout.name, runs=runs)
