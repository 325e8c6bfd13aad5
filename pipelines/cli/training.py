"""`areal-flow train`, `sft`, `dpo` and `reward-model`: a new run, or an old one continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from areal_flow.config.messages import OPTION
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import return_freed_memory
from areal_flow.core.settings import nest
from areal_flow.log.directory import find_run
from pipelines.cli.settings import EXIT_CODES, Flag, Given, Overrides

if TYPE_CHECKING:
    from pipelines.jobs.job import Fork, Job


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RunChoice:
    """The run to create or resume."""

    name: str | None = None
    """Run name; by default the recipe's name (or that of --data) and the time."""
    resume: str | None = None
    """Resume this run; only --num-steps and --max-minutes may change."""
    datasets: str = ""
    """s3://BUCKET/FOLDER for the datasets of a new run; everything else stays in its directory."""
    take_over: Flag = False
    """With --resume: take the run over from a driver that hangs."""
    log_format: Literal["text", "json"] = "text"
    """Console format; json: one line per event with time, level, run, step, worker, message."""


def train(
    recipe: Path | None = None,
    /,
    *,
    choice: RunChoice | None = None,
    accept_verifier: Flag = False,
    from_: Annotated[str | None, Parameter(name="--from", metavar="RUN[@STEP]")] = None,
    reset_optimizer: Flag = False,
    data: Annotated[str | None, Parameter(name=("--data", "--prompts"))] = None,
    skip_bad_rows: Flag = False,
    settings: Overrides | None = None,
    folders: Given,
) -> int:
    """Train a policy: everything from prompts to a registered model.

    Args:
        recipe: A TOML recipe, or the name of a shipped one. Without it, settings follow --model
            and --data; with none of these it is `arithmetic`.
        accept_verifier: With --resume: accept a changed verifier; nothing is compared across the
            change.
        from_: Fork a run (RUN) or one of its steps (RUN@STEP); other options override its
            recipe.
        reset_optimizer: With --from: start with a fresh optimizer state.
        data: Prompts instead of those of the recipe: a file (JSONL, Parquet, CSV, Arrow), a folder
            of save_to_disk, or a dataset of the hub (openai/gsm8k:main@train).
        skip_bad_rows: Skip bad rows and list them.
    """
    if reset_optimizer and from_ is None:
        raise ConfigError("--reset-optimizer goes with --from")
    from pipelines.jobs.job import TRAINING, fork_of

    choice, given = choice or RunChoice(), dict(settings or {})
    if data is not None:
        given["prompts.path"] = data
    if skip_bad_rows:
        given["prompts.skip_bad_rows"] = True
    source: Path | Fork | None = recipe
    if from_ is not None:
        if recipe or choice.resume:
            raise ConfigError(
                "expected one of a recipe, --resume and --from: a fork has the recipe of its "
                "parent, with the settings given"
            )
        source = fork_of(folders.find(from_), reset_optimizer=reset_optimizer)
    how: Any = {"accept_verifier": accept_verifier, "data": data}
    return _launch(TRAINING, source, choice, given, folders, **how)


def _supervised(name: str, meaning: str, fields: str, by_default: str) -> Callable[..., int]:
    """Return a command that learns from rows; for `sft` the recipe chooses the objective."""

    def learn(
        recipe: Path | None = None,
        /,
        *,
        data: str | None = None,
        choice: RunChoice | None = None,
        settings: Overrides | None = None,
        folders: Given,
    ) -> int:
        from pipelines.jobs.job import SFT, supervised

        choice, given = choice or RunChoice(), dict(settings or {})
        if data is not None and choice.resume is not None:
            raise ConfigError("--data goes with a new run: one that is resumed keeps its rows")
        if data is not None:
            given["sft.path"] = data
        if name == "sft":
            return _launch(SFT, recipe, choice, given, folders, data=data)
        if choice.resume is None:
            given["sft.objective"] = name
        return _launch(supervised(name), recipe, choice, given, folders, data=data)

    learn.__name__ = name
    learn.__doc__ = f"""{meaning}

    Args:
        recipe: A TOML recipe with [sft], or the name of a shipped one. Without it, settings
            follow --model and --data; with none of these it is `{by_default}`.
        data: {fields}, texts or messages, instead of the recipe's.
    """
    return learn


def _launch(
    job: Job,
    recipe: Path | Fork | None,
    choice: RunChoice,
    settings: dict[str, Any],
    folders: Given,
    *,
    accept_verifier: bool = False,
    data: str | None = None,
) -> int:
    from pipelines.jobs.job import launch

    return_freed_memory(max_arenas=2)  # a driver lives as long as its run
    if choice.resume is None and (choice.take_over or accept_verifier):
        raise ConfigError("--take-over and --accept-verifier go with --resume")
    if choice.resume is not None and (recipe or choice.name or choice.datasets):
        raise ConfigError("a resumed run keeps its recipe, name and datasets: leave them out")
    _, outcome = launch(
        job,
        recipe,
        nest(settings),
        runs=folders.runs,
        began=folders.began,
        resumed=None if choice.resume is None else find_run(folders.runs, choice.resume),
        take_over=choice.take_over,
        accept_verifier=accept_verifier,
        name=choice.name,
        default_stem=Path(data).stem if data and not recipe else "",
        datasets=choice.datasets,
        spelling=OPTION,
        log_format=choice.log_format,
    )
    return 0 if outcome.finished else EXIT_CODES[outcome.stopped_by]


_PAIRS = "Rows (as of `train --data`) with prompt, chosen and rejected"
COMMANDS = (
    train,
    _supervised(
        "sft",
        "Fine-tune a policy on prompts with completions; `train --model` continues from it.",
        "Rows (as of `train --data`) with prompt and completion",
        "arithmetic",
    ),
    _supervised(
        "dpo",
        "Train a policy on preference pairs, relative to the initial policy (DPO).",
        _PAIRS,
        "dpo",
    ),
    _supervised(
        "reward_model",
        "Train a reward model on preference pairs, from the layers of a policy (Bradley-Terry).",
        _PAIRS,
        "reward_model",
    ),
)
