"""A run from its creation, fork or resumption to its recorded end.

The command line and the Python API both call `launch`. What a job prepares and computes is in its
own module; this one knows how a driver takes hold of a run and how it leaves it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import sys
from collections.abc import Callable, Collection, Coroutine
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
from areal_flow.config.messages import nearest, spell
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import ConfigError, EpisodeError, RewardError, RunError
from areal_flow.core.failures import first_line
from areal_flow.core.layout import RunLayout, run_layout
from areal_flow.core.lease import Writer
from areal_flow.core.program import command, from_here
from areal_flow.core.settings import flatten, merge, nest
from areal_flow.log.dataset import read_errors
from areal_flow.log.directory import (
    State,
    create_run,
    first_num_steps,
    hold_run,
    leave_run,
    removed_on_failure,
)
from areal_flow.log.inputs import Verifier, accept, check_inputs
from areal_flow.log.ledger import LedgerReader
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.rewards.shipping import what_is_executed
from areal_flow.tracking.registry import show_report, track
from areal_flow.training.settings import SftSettings
from areal_flow.training.supervised import OBJECTIVES
from pipelines.console.progress import line_progress
from pipelines.console.run_log import log, log_kept, print_as, say
from pipelines.jobs.defaults import batch_sizes
from pipelines.jobs.preflight import check_devices, describe_devices, found_verifier
from pipelines.jobs.prepare import prepare_training
from pipelines.jobs.sft import prepare_sft_run, run_sft, sft_workers
from pipelines.jobs.stop_signals import (
    Outcome,
    is_called_from_python,
    raised_as_interrupts,
    wait_for,
)
from pipelines.jobs.train import run_training
from pipelines.models import Reference, newest_checkpoint

RECIPES = Path(__file__).parent.parent / "recipes"
DEFAULT_RECIPE = RECIPES / "arithmetic.toml"
MAY_CHANGE = ("num_steps", "max_minutes")
"""Settings that a resume may change."""
KIND_OF_OPTIMIZER = ("trainer.optimizer", "trainer.adamw.betas")
"""Settings on which the meaning of an optimizer's state depends."""
_BUCKET = re.compile(r"s3://[^/\s]+(/\S+)?")
_ACCEPT = (
    "\nIf you change the verifier or agent before resuming, add --accept-verifier (in Python "
    "accept_verifier=True); without it the resume is refused."
)
_NOT_OF_NAMES = re.compile(r"[^\w.-]+")
_TIME_OF_NAME = re.compile(r"-\d{8}-\d{6}$")

logger = logging.getLogger(__name__)


def recipe_path(given: Path) -> Path:
    if given.is_file():
        return given
    shipped = {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}
    if str(given) not in shipped:
        names = ", ".join(shipped)
        advice = "".join(f". Did you mean {name}?" for name in nearest(str(given), shipped)[:1])
        raise ConfigError(
            f"expected a recipe at {given} or one of {names}, found no such file{advice}"
        )
    return shipped[str(given)]


@dataclass(frozen=True, slots=True)
class Fork:
    """A new run that starts from another run's policy, and from its recipe with overrides."""

    parent: RunLayout
    step: int | None
    """None: the newest usable checkpoint."""
    reset_optimizer: bool = False

    def recipe(self, overrides: dict[str, Any], *, spelling: str = "{}") -> Recipe:
        fixed = [name for name in flatten(overrides) if name.split(".")[0] in ("model", "sft")]
        if fixed:
            raise ConfigError(
                f"{', '.join(spelling.format(name.replace('_', '-')) for name in fixed)}: a fork "
                f"keeps the model of run {self.parent.name} and is not fine-tuned again. "
                "To begin with another model, start a run with --model and without --from"
            )
        own = load_recipe(self.parent.config)
        changed = flatten(overrides.get("trainer", {}).get("lora", {}), "trainer.lora.")
        if any(flatten(own.model_dump())[name] != value for name, value in changed.items()):
            raise ConfigError(
                f"{', '.join(changed)}: a fork has the adapter of run {self.parent.name}, or none "
                "if it has none. To change it, export a step and give that to --model"
            )
        num_steps = first_num_steps(self.parent) or own.num_steps
        if own.trainer.num_decay_steps == num_steps:
            overrides = merge({"trainer": {"num_decay_steps": 0}}, overrides)
        return load_recipe(self.parent.config, overrides, spelling=spelling)

    def begin(self, layout: RunLayout, recipe: Recipe, writer: Writer) -> Recipe:
        """Write the new run's checkpoint 0; return the recipe with that as its model."""
        from areal_flow.flow.recovery.replay import write_version_0  # torch

        own = load_recipe(self.parent.config).function_paths
        kept = (path for path in recipe.function_paths if path in own)
        if executed := what_is_executed(kept):
            say(executed)
        model = str(checkpoint_path(layout.checkpoints, 0))
        recipe = recipe.model_copy(update={"model": model, "sft": SftSettings()})
        if self.parent.rewards.is_dir():
            shutil.copytree(self.parent.rewards, layout.rewards, dirs_exist_ok=True)
        progress, what = line_progress(), f"run {self.parent.name}: replaying step"
        wait_for(
            lambda: write_version_0(
                layout,
                recipe,
                writer,
                parent=self.parent,
                step=self.step,
                fresh_optimizer=self._why_fresh(recipe),
                on_replayed=lambda at, last: progress.count(what, at, last),
            )
        )
        return recipe

    def _why_fresh(self, recipe: Recipe) -> str:
        """Return why the parent's optimizer state cannot be used; empty if it can."""
        if self.reset_optimizer:
            return "fresh, as asked for"
        before, after = (
            flatten(of.model_dump()) for of in (load_recipe(self.parent.config), recipe)
        )
        changed = [name for name in KIND_OF_OPTIMIZER if before[name] != after[name]]
        return f"fresh, since {' and '.join(changed)} changed" if changed else ""


def fork_of(reference: Reference, *, reset_optimizer: bool = False) -> Fork:
    parent, step = reference.run, reference.step
    if not parent.steps.exists():
        raise RunError(
            f"run {parent.name} has no ledger: expected one that `areal-flow train` made. What "
            f"`areal-flow sft` made is a model: give it to --model"
        )
    with read_errors(parent.steps):
        head = LedgerReader(parent).head
    if head < 0:
        raise RunError(
            f"run {parent.name} has no policy yet: it is still before its version 0; "
            f"wait for it, or go on with it first by --resume {parent.name}"
        )
    if step is not None and step > head:
        raise RunError(f"run {parent.name} has no step {step}: expected a step from 0 to {head}")
    return Fork(parent, step, reset_optimizer)


def chosen_recipe(
    given: Recipe | Path | str | Fork | None,
    over: dict[str, Any],
    *,
    default: str = DEFAULT_RECIPE.stem,
    spelling: str = "{}",
) -> tuple[str, Recipe]:
    """Return a recipe's name, and the recipe with overrides.

    Args:
        given: None: plain defaults if the overrides name a model or rows, else `default`.
        over: a nested table.
        default: name of a shipped recipe.
        spelling: how messages spell a setting.
    """
    if given is None and not names_task(over):
        given = default
    match given:
        case Fork():
            return given.parent.name, given.recipe(over, spelling=spelling)
        case Path() | str():
            path = recipe_path(Path(given))
            return path.stem, load_recipe(path, over, spelling=spelling)
        case Recipe():
            table = given.model_dump(mode="json")
            return "python", build_recipe(table, over, source="the recipe given")
        case None:
            sizes = nest(batch_sizes(flatten(over)))
            name = Path(str(over.get("model", ""))).name
            return name or "plain", build_recipe(sizes, over, source="", spelling=spelling)
    raise ConfigError(
        f"expected a recipe as a path or a Recipe, found {type(given).__name__}: give "
        "settings as keywords, train(**settings)"
    )


def names_task(over: dict[str, Any]) -> bool:
    """Return whether overrides name a model or rows: then no shipped recipe is meant."""
    prompts, sft = over.get("prompts", {}), over.get("sft", {})
    return bool({"model", "sources"} & over.keys() or {"path", "source"} & prompts.keys()) or (
        "path" in sft
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What a command does with a run."""

    command: str
    prepare: Callable[[RunLayout, Recipe, Collection[str] | None], str]
    """Writes what a new run needs; returns a summary to print. The names are of settings that the
    user gave, where others may follow the model and the rows; None: all stay."""
    drive: Callable[..., Coroutine[Any, Any, Outcome]]
    workers: Callable[[Recipe], list[WorkerPlacement]]
    """The workers that `drive` starts."""
    prepared: Callable[[RunLayout], Path]
    """The last file that `prepare` writes."""
    verifier: Callable[[RunLayout, Recipe], Verifier]
    """Returns the identity of the code that scores now."""
    conclude: Callable[[RunLayout], None]
    """Called after a run is finished and recorded as such."""
    default: str = DEFAULT_RECIPE.stem
    """The shipped recipe of a run without a recipe, a model or rows."""


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
    """Send a finished run to its tracker; if that is unreachable, say how to do it later."""
    try:
        deliver()
    except Exception as error:  # noqa: BLE001  the run is finished anyway
        again = command("track", layout.name, runs=layout.root.parent)
        logger.warning("the tracker is unreachable; deliver by %s: %s", again, first_line(error))


def _conclude_sft(layout: RunLayout) -> None:
    recipe, runs = load_recipe(layout.config), layout.root.parent
    if recipe.tracking.enabled:
        _deliver(layout, partial(track, layout.root, recipe.tracking.uri))
    if not OBJECTIVES[recipe.sft.objective].makes_reward_model:
        model, prompts = ("--model", from_here(newest_checkpoint(layout))), recipe.prompts
        has_prompts = recipe.sources or prompts.source != Recipe().prompts.source
        if recipe.sft.path and not has_prompts:  # the default's sums have nothing to do with them
            system = "--prompts.system-prompt", prompts.system_prompt
            options = *model, *(system if prompts.system_prompt else ())
            further = command("train", "--data", "PROMPTS.jsonl", *options, runs=runs)
            say(f"Train it further, on rows with a question and an answer, with: {further}")
        else:
            again = from_here(layout.config), *model, "--sft.num-steps", 0
            say(f"Train it further with: {command('train', *again, runs=runs)}")
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
    """Return the URL of a run's datasets in an object store."""
    if not _BUCKET.fullmatch(folder):
        raise ConfigError(
            f"--datasets: expected s3://BUCKET/FOLDER, found {folder!r}; credentials and a region "
            "or an endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT"
        )
    return f"{folder.rstrip('/')}/{name}"


def supervised(objective: str) -> Job:
    return replace(SFT, command=objective.replace("_", "-"), default=objective)


def launch(
    job: Job,
    recipe: Recipe | Path | str | Fork | None,
    overrides: dict[str, Any],
    *,
    runs: Path,
    began: float,
    resumed: RunLayout | None = None,
    take_over: bool = False,
    accept_verifier: bool = False,
    name: str | None = None,
    default_stem: str = "",
    datasets: str = "",
    fill: Callable[[RunLayout, Recipe], Recipe] | None = None,
    spelling: str = "{}",
    log_format: str = "text",
) -> tuple[RunLayout, Outcome]:
    """Start a new run, or resume one, and drive it to its end.

    Args:
        recipe: the recipe of a new run; None: see `chosen_recipe`.
        overrides: a nested table of settings that override the recipe's.
        runs: the folder of a new run.
        began: `monotonic()` when the program began.
        resumed: the run to resume, instead of a new one.
        take_over: with `resumed`: even if a driver that hangs holds the run.
        accept_verifier: with `resumed`: even if the code that scores changed.
        name: name of a new run; by default `default_stem`, or the recipe's name, and the time.
        datasets: a folder in an object store for a new run's datasets; "": its own directory.
        fill: writes rows and rewards of the caller into a new run's directory; returns the recipe
            that names them.
        spelling: how messages spell a setting.
    """
    if resumed is not None:
        chosen = recipe_to_resume(resumed, overrides, spelling=spelling)
        print_as(log_format, resumed.name)
        return resumed, resume(
            job,
            resumed,
            chosen,
            take_over=take_over,
            accept_verifier=accept_verifier,
            began=began,
        )
    recipe_name, chosen = chosen_recipe(recipe, overrides, default=job.default, spelling=spelling)
    is_plain = recipe is None and names_task(overrides)
    stem = _NOT_OF_NAMES.sub("-", _TIME_OF_NAME.sub("", default_stem or recipe_name))
    layout = run_layout(runs, name or f"{stem}-{datetime.now():%Y%m%d-%H%M%S}")
    print_as(log_format, layout.name)
    fork = recipe if isinstance(recipe, Fork) else None
    return layout, start(
        job,
        layout,
        chosen,
        recipe_name=recipe_name,
        fill=fill,
        fork=fork,
        given=[*flatten(overrides)] if is_plain else None,
        datasets=datasets,
        began=began,
    )


def start(
    job: Job,
    layout: RunLayout,
    recipe: Recipe,
    *,
    began: float,
    recipe_name: str = "",
    fill: Callable[[RunLayout, Recipe], Recipe] | None = None,
    fork: Fork | None = None,
    given: Collection[str] | None = None,
    datasets: str = "",
) -> Outcome:
    """Create a run and drive it to its end; an error while it is prepared removes it again.

    Args:
        given: names of settings that stay, where others follow the model and the rows.
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
            if fill is not None:
                recipe = fill(layout, recipe)
            if fork is not None:
                recipe = fork.begin(layout, recipe, writer)
            layout.config.write_text(dump_recipe(recipe))
            prepared = job.prepare(layout, recipe, given)
            recipe = load_recipe(layout.config)  # `prepare` may choose what it leaves open
        with log_kept(layout.log):
            say(f"Run {layout.name} in {layout.root}: {prepared}", describe_devices(recipe))
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
    if not job.prepared(layout).exists():
        raise RunError(
            f"expected a run that `areal-flow {job.command}` prepared in {layout.root}, found none "
            f"of its files: start a new one, or resume it with the command that made it"
        )
    check_devices(recipe)
    if executed := what_is_executed(recipe.function_paths):
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
    """Record the number of steps for reports, workers and the next resume."""
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
            print(message, file=sys.stdout if is_called_from_python() else sys.stderr, flush=True)
            log(message)
    if outcome.finished:
        job.conclude(layout)
    return outcome


def _resumption(job: Job, layout: RunLayout) -> str:
    runs = layout.root.parent
    if job.command == TRAINING.command and is_called_from_python():
        where = "" if runs == Path("runs").resolve() else f", runs={str(runs)!r}"
        return f"areal_flow.train(resume={layout.name!r}{where})"
    return command(job.command, "--resume", layout.name, runs=runs)
