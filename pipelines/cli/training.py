"""`areal-flow train`, `sft`, `dpo` and `reward-model`: a new run, or an old one continued."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from areal_flow.config import load_recipe
from areal_flow.config.messages import OPTION
from areal_flow.errors import ConfigError
from areal_flow.run.directory import find_run
from areal_flow.run.layout import run_layout
from areal_flow.settings import nest
from pipelines.cli.settings import EXIT_CODES, Flag, Given, Overrides

if TYPE_CHECKING:
    from areal_flow.config import SupervisedObjective
    from pipelines.jobs.forking import Fork
    from pipelines.jobs.job import Job


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Which:
    """Which run to make or to go on with."""

    name: str | None = None
    """Of the run's directory; recipe and time by default."""
    resume: str | None = None
    """The run to continue; only --num-steps and --max-minutes may change."""
    take_over: Flag = False
    """With --resume: even if its driver hangs."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class WhichTraining(Which):
    """Which run to train."""

    accept_verifier: Flag = False
    """With --resume: even if the code that scores changed; nothing is compared across it."""


def train(
    recipe: Path | None = None,
    /,
    *,
    which: WhichTraining | None = None,
    from_: Annotated[str | None, Parameter(name="--from", metavar="RUN[@STEP]")] = None,
    reset_optimizer: Flag = False,
    data: Annotated[Path | None, Parameter(name=("--data", "--prompts"))] = None,
    skip_bad_rows: Flag = False,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Train a policy: everything from prompts to a registered model.

    Args:
        recipe: A TOML recipe, or the name of a shipped one; `arithmetic` by default.
        from_: Begin with the policy of another run, and its recipe with any setting over it; of
            its newest checkpoint, or of a step.
        reset_optimizer: With --from: without that run's optimizer state.
        data: Prompts as JSONL or Parquet, instead of the recipe's.
        skip_bad_rows: Leave out and list rows that are wrong.
    """
    if reset_optimizer and from_ is None:
        raise ConfigError("--reset-optimizer goes with --from")
    from pipelines.jobs.job import TRAINING

    given = dict(settings or {})
    if data is not None:
        given |= {"prompts.source": "file", "prompts.path": str(data), "sources": []}
    if skip_bad_rows:
        given["prompts.skip_bad_rows"] = True
    if from_ is None:
        return _drive(TRAINING, recipe, which or WhichTraining(), given, folders)
    if recipe or (which and which.resume):
        raise ConfigError(
            "expected one of a recipe, --resume and --from: a fork has the recipe of its parent, "
            "with the settings given"
        )
    from pipelines.jobs.forking import fork_of

    fork = fork_of(folders.find(from_), reset_optimizer=reset_optimizer)
    return _drive(TRAINING, None, which or WhichTraining(), given, folders, fork=fork)


def sft(
    recipe: Path | None = None,
    /,
    *,
    data: Path | None = None,
    which: Which | None = None,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Fine-tune a policy on prompts with their completions; `train --model` goes on from it.

    Args:
        recipe: A TOML recipe with [sft], or the name of a shipped one; `arithmetic` by default.
        data: JSONL with prompt and completion, texts or messages, instead of the recipe's.
    """
    from pipelines.jobs.job import SFT

    which = which or Which()
    return _drive(SFT, recipe, which, _with_rows(data, which, settings), folders)


def dpo(
    recipe: Path | None = None,
    /,
    *,
    data: Path | None = None,
    which: Which | None = None,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Train a policy on pairs of completions to prefer one, against the policy that it was (DPO).

    Args:
        recipe: A TOML recipe with [sft], or the name of a shipped one; `dpo` by default.
        data: JSONL or Parquet with prompt, chosen and rejected, texts or messages, instead of the
            recipe's.
    """
    return _learn_pairs("dpo", recipe, data, which, settings, folders)


def reward_model(
    recipe: Path | None = None,
    /,
    *,
    data: Path | None = None,
    which: Which | None = None,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Train a reward model on pairs of completions, from a policy's layers (Bradley-Terry).

    Args:
        recipe: A TOML recipe with [sft], or the name of a shipped one; `reward_model` by default.
        data: JSONL or Parquet with prompt, chosen and rejected, texts or messages, instead of the
            recipe's.
    """
    return _learn_pairs("reward_model", recipe, data, which, settings, folders)


def _learn_pairs(
    objective: SupervisedObjective,
    recipe: Path | None,
    data: Path | None,
    which: Which | None,
    settings: dict[str, Any] | None,
    folders: Given,
) -> int:
    from pipelines.jobs.job import supervised

    which = which or Which()
    settings = _with_rows(data, which, settings)
    if which.resume is None:
        settings["sft.objective"] = objective
        recipe = recipe or Path(objective)
    return _drive(supervised(objective), recipe, which, settings, folders)


def _with_rows(data: Path | None, which: Which, settings: dict[str, Any] | None) -> dict[str, Any]:
    if data is not None and which.resume is not None:
        raise ConfigError("--data goes with a new run: one that is resumed keeps its rows")
    return {**(settings or {}), **({} if data is None else {"sft.path": str(data)})}


def _drive(
    job: Job,
    path: Path | None,
    which: Which,
    settings: dict[str, Any],
    folders: Given,
    fork: Fork | None = None,
) -> int:
    from pipelines.jobs import job as jobs

    overrides = nest(settings)
    accept_verifier = isinstance(which, WhichTraining) and which.accept_verifier
    if which.resume is None:
        if which.take_over or accept_verifier:
            raise ConfigError("--take-over and --accept-verifier go with --resume")
        path = jobs.recipe_path(path)
        if fork is None:
            stem, recipe = path.stem, load_recipe(path, overrides, spelling=OPTION)
        else:
            stem, recipe = fork.parent.name, fork.recipe(overrides, spelling=OPTION)
        layout = run_layout(folders.runs, which.name or jobs.default_name(stem))
        began = folders.began
        outcome = jobs.start(job, layout, recipe, began=began, recipe_name=stem, fork=fork)
    else:
        layout = find_run(folders.runs, which.resume)
        if path or which.name:
            raise ConfigError("a resumed run keeps its recipe and its name: leave them out")
        recipe = jobs.recipe_to_resume(layout, overrides, spelling=OPTION)
        outcome = jobs.resume(
            job,
            layout,
            recipe,
            take_over=which.take_over,
            accept_verifier=accept_verifier,
            began=folders.began,
        )
    return 0 if outcome.finished else EXIT_CODES[outcome.stopped_by]


COMMANDS = (train, sft, dpo, reward_model)
