"""The Python API: `areal-flow train`, `evaluate`, `sft` and `report` from a script or a notebook.

Ctrl-C, or an interrupt of a notebook's cell, ends training after the current step: the run stops
with a checkpoint, and is returned like a finished one. A second interrupt ends it at once.

Settings override the recipe's as keywords, `num_steps=20`, `trainer={"learning_rate": 1e-5}`, or by
dotted name, `**{"trainer.learning_rate": 1e-5}`. A name that only one section has needs no section:
`max_new_tokens=200`. In `train`, those of fine-tuning and of how evaluations sample need theirs.
Functions are shipped to the workers with everything they need.

`train(wait=False)` trains in a thread of this process, so that a notebook can plot meanwhile:

    handle = areal_flow.train(prompts=rows, rewards=brevity, wait=False)
    handle.run.plot.reward()
    handle.status.step, handle.stop(), handle.result()
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal, overload

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.core.settings import merge, nest
from areal_flow.log.queries import Run
from areal_flow.rewards.shipping import ship_function
from pipelines.arguments import (
    NOT_OF_TRAINING,
    Function,
    Rewards,
    Rows,
    bad_rows_numbered,
    file_of,
    name_of,
    placed,
    placeholder,
    reward_tables,
    with_names,
    workflow_table,
)
from pipelines.jobs import job as jobs
from pipelines.jobs.background import BackgroundRun, refuse_second_run
from pipelines.jobs.evaluate import EvaluationResult, evaluate_model
from pipelines.jobs.job import Fork, fork_of
from pipelines.jobs.stop_signals import Outcome
from pipelines.jobs.train import OnStep, run_training
from pipelines.models import Reference, find_reference, newest_checkpoint
from pipelines.notebook import ReportPage, open_run
from pipelines.notebook import Run as ShownRun


@overload
def train(
    recipe: Recipe | Path | str | None = None,
    *,
    prompts: Rows | None = None,
    held_out: Rows | None = None,
    rewards: Rewards = (),
    agent: Function | None = None,
    tools: Function | Sequence[Function] = (),
    source: Run | Path | str | None = None,
    reset_optimizer: bool = False,
    resume: Run | Path | str | None = None,
    accept_verifier: bool = False,
    name: str | None = None,
    runs: Path | str = "runs",
    datasets: str = "",
    on_step: OnStep | None = None,
    wait: Literal[True] = True,
    **settings: Any,
) -> ShownRun: ...
@overload
def train(
    recipe: Recipe | Path | str | None = None, *, wait: Literal[False], **others: Any
) -> BackgroundRun: ...
def train(
    recipe: Recipe | Path | str | None = None,
    *,
    prompts: Rows | None = None,
    held_out: Rows | None = None,
    rewards: Rewards = (),
    agent: Function | None = None,
    tools: Function | Sequence[Function] = (),
    source: Run | Path | str | None = None,
    reset_optimizer: bool = False,
    resume: Run | Path | str | None = None,
    accept_verifier: bool = False,
    name: str | None = None,
    runs: Path | str = "runs",
    datasets: str = "",
    on_step: OnStep | None = None,
    wait: bool = True,
    **settings: Any,
) -> ShownRun | BackgroundRun:
    """Train a policy; return the run to read.

    Args:
        recipe: settings, or the path of a TOML recipe. Without it, settings follow the model and
            the prompts; with none of these it is the arithmetic recipe.
        prompts: rows with a question, or messages, and an answer, in the recipe's fields.
        held_out: rows that are never trained on, instead of a share of the prompts.
        rewards: functions that take `prompt`, `completion`, `answer` and any column of a row as
            keywords and return a number, or have TRL's signature; names of verifiers; or tables
            with one of these as `verifier`, and `weight` or another setting of `[[rewards]]`.
        agent: a function that is the episode, as `workflow.path` of the workflow `agent` describes.
        tools: functions that the policy may call, of a text or of arguments, or names as in
            `workflow.tools`; for other settings of this workflow, `workflow={"max_calls": 8}`.
        source: fork this run, `"RUN"` or `"RUN@STEP"`: start from its policy and its recipe.
        reset_optimizer: with `source`: start with a fresh optimizer state.
        resume: a run to resume, with only `num_steps`, `max_minutes` and `accept_verifier`.
        accept_verifier: with `resume`: even if the code that scores changed.
        name: name of the run; by default recipe and time.
        runs: the folder of runs.
        datasets: `s3://BUCKET/FOLDER` for the new run's datasets; the rest stays in its directory.
        on_step: called with the row of each committed step, a dict with the columns of
            `Run.steps`. The next step waits for it; generation does not. If it returns True,
            training ends after this step, and the run finishes. Its first error is logged; the run
            goes on.
        wait: False returns once the run is prepared, and trains in the background.
        settings: override the recipe's.

    Raises:
        ArealFlowError: a setting or a prompt is wrong and nothing was started, or the run failed.
        KeyboardInterrupt: interrupted twice, or while there was no step to finish.
    """
    refuse_second_run()
    began, runs = monotonic(), Path(runs)
    background = None if wait else BackgroundRun()
    drive = run_training if background is None else background.drive
    job = replace(jobs.TRAINING, drive=partial(drive, on_step=on_step))
    new = {"recipe": recipe, "prompts": prompts, "source": source, "name": name}
    new |= {"rewards": rewards or None, "reset_optimizer": reset_optimizer or None}
    new |= {"held_out": held_out, "agent": agent, "tools": tools or None}
    new |= {"datasets": datasets or None}
    given = [key for key, value in new.items() if value is not None]
    if resume is not None:
        if given:
            raise ConfigError(f"expected resume without {', '.join(given)}: a run keeps its own")
        reference = _find_run(runs, resume, argument="resume")
        if reference.step is not None:
            raise ConfigError(
                f"expected resume without a step, found {resume!r}: a run goes on from where it "
                f"stands. To begin a new run with that step's policy: source={resume!r}"
            )
        resumed: Any = {"resumed": reference.run, "accept_verifier": accept_verifier}
        resumed |= {"runs": runs, "began": began}
        return _begun(partial(jobs.launch, job, None, nest(settings), **resumed), background)
    if accept_verifier:
        raise ConfigError("accept_verifier goes with resume")
    if reset_optimizer and source is None:
        raise ConfigError("reset_optimizer goes with source")
    if source is not None and recipe is not None:
        raise ConfigError("expected a recipe or a source, found both")
    start: Recipe | Path | str | Fork | None = recipe
    if source is not None:
        parent = _find_run(runs, source, argument="source")
        start = fork_of(parent, reset_optimizer=reset_optimizer)
    overrides = placed(settings, section="prompts", refused=NOT_OF_TRAINING)
    if workflow := workflow_table(overrides.get("workflow"), agent, tools):
        overrides["workflow"] = workflow
    data: Any = {"rows": prompts, "held_out": held_out, "rewards": rewards}
    how: Any = {"name": name, "runs": runs, "datasets": datasets, "began": began}
    launch = partial(_launch, job, start, overrides, "prompts", **data, **how)
    return _begun(launch, background)


def evaluate(
    model: Run | Path | str,
    *,
    prompts: Rows | None = None,
    num_prompts: int | None = None,
    runs: Path | str = "runs",
    registry: str | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Answer held-out prompts with a policy; return pass rates and answers.

    Args:
        model: a run, its name, models:/NAME@ALIAS, or a model directory.
        prompts: as for `train`, instead of the run's own held-out ones.
        num_prompts: answer only the first ones.
        runs: the folder of runs.
        registry: MLflow's address, for models:/...
        settings: override the run's, as for `train`; those of `evaluation` need no section:
            `temperature=0`, `top_p=0.9`, `num_samples=8`, `max_new_tokens=200`.

    Raises:
        ModelError: there is no such model, or no prompts are known for it.
    """
    refuse_second_run()
    if isinstance(model, Run):
        title, directory = model.layout.name, newest_checkpoint(model.layout)
    else:
        title = str(model)
        directory = find_reference(Path(runs), str(model), registry=registry).model()
    scratch = tempfile.TemporaryDirectory(prefix="areal-flow-prompts-")
    overrides = placed(settings, section="evaluation")
    with scratch, bad_rows_numbered(prompts, stem="given"):
        path = Path(scratch.name) / "given.jsonl"
        data = [] if prompts is None else [str(file_of(prompts, path))]
        return evaluate_model(
            directory, data=data, limit=num_prompts, title=title, settings=overrides
        )


def sft(
    recipe: Recipe | Path | str | None = None,
    *,
    rows: Rows | None = None,
    name: str | None = None,
    runs: Path | str = "runs",
    **settings: Any,
) -> Path:
    """Fine-tune a policy on prompts with their completions; return its Hugging Face directory.

    Args:
        recipe: settings, or the path of a TOML recipe; without it, settings follow the model and
            the rows.
        rows: rows with `prompt` and `completion`, or `messages`, instead of the recipe's file.
        name: name of the run; by default recipe and time.
        runs: the folder of runs.
        settings: as for `train`: `model="org/name"`, `sft={"num_steps": 200}`.

    Raises:
        ArealFlowError: a setting or a row is wrong and nothing was started, or the run failed.
    """
    refuse_second_run()
    overrides = placed(settings, section="sft")
    how: Any = {"name": name, "runs": Path(runs), "began": monotonic()}
    layout, _ = _launch(jobs.SFT, recipe, overrides, "sft", rows, **how)
    return newest_checkpoint(layout)


def report(
    run: Run | Path | str,
    *,
    against: Run | Path | str | None = None,
    prices: Mapping[str, float] | None = None,
    to: Path | str | None = None,
    runs: Path | str = "runs",
) -> ReportPage:
    """Render a run, finished or not, as one HTML page; return its path.

    Args:
        run: a run, its name or its directory.
        against: another run to show next to it.
        prices: per hour, such as `{"gpu": 2.5}`; they override the recipe's `cluster.prices`.
        to: output file, instead of `report.html` in the run directory.
        runs: the folder of runs.

    Raises:
        RunError: there is no such run, or it was never prepared for training.
    """
    from pipelines.pages.report import write_report

    def layout_of(run: Run | Path | str) -> RunLayout:
        return (run if isinstance(run, Run) else open_run(run, runs=runs)).layout

    path = write_report(
        layout_of(run),
        None if to is None else Path(to),
        against=None if against is None else layout_of(against),
        prices=prices,
    )
    page = ReportPage(path)
    page.facts = open_run(layout_of(run).root).key_figures()
    return page


def _find_run(runs: Path, run: Run | Path | str, *, argument: str) -> Reference:
    if not isinstance(run, Run | Path | str):
        raise ConfigError(f"expected {argument} as a run or its name, found {run!r:.80}")
    return find_reference(runs, str(run.layout.root if isinstance(run, Run) else run))


def _launch(
    job: jobs.Job,
    recipe: Recipe | Path | str | Fork | None,
    overrides: dict[str, Any],
    section: str,
    rows: Rows | None,
    held_out: Rows | None = None,
    rewards: Rewards = (),
    **how: Any,
) -> tuple[RunLayout, Outcome]:
    """Launch a new run with the caller's rows, as the `path` of a section, and functions."""
    tables, workflow = reward_tables(rewards), overrides.get("workflow", {})
    files = {"path": (rows, section), "held_out_path": (held_out, "held_out")}
    files = {setting: given for setting, given in files.items() if given[0] is not None}
    # A recipe is validated before there is a directory to write rows and functions to.
    for setting, (given, _) in files.items():
        path = str(given) if isinstance(given, Path | str) else "given.jsonl"
        overrides = merge(overrides, {section: {setting: path}})
    if workflow:
        overrides = {**overrides, "workflow": with_names(workflow, placeholder)}
    if tables:
        named = [{**each, "verifier": name_of(each)} for each in tables]
        overrides = merge(overrides, {"rewards": named})

    def fill(layout: RunLayout, recipe: Recipe) -> Recipe:
        table = recipe.model_dump(mode="json")
        for setting, (given, stem) in files.items():
            table[section][setting] = str(file_of(given, layout.root / f"{stem}.jsonl"))
        if workflow:
            shipped = with_names(workflow, partial(ship_function, directory=layout.rewards))
            table["workflow"].update(shipped)
        for place, each in enumerate(tables):
            if callable(function := each["verifier"]):
                table["rewards"][place]["verifier"] = ship_function(function, layout.rewards)
        return build_recipe(table, source=str(layout.config))

    held_out_numbered = bad_rows_numbered(held_out, stem="held_out", name="the held-out rows given")
    with bad_rows_numbered(rows, stem=section), held_out_numbered:
        return jobs.launch(job, recipe, overrides, fill=fill, **how)


def _begun(
    launch: Callable[[], tuple[RunLayout, Outcome]], background: BackgroundRun | None
) -> ShownRun | BackgroundRun:
    if background is None:
        layout, _ = launch()
        return open_run(layout.root)
    background.begin(lambda: launch()[0])
    return background
