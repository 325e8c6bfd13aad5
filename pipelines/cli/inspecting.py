"""Commands that read runs and models, from `evaluate` to `report`; `settings` and `verify`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import TypeAdapter, ValidationError

from areal_flow.core.errors import ConfigError
from pipelines.cli.settings import AnswerSettings, Flag, Given, Prices, report_settings
from pipelines.console.tables import Report, Table
from pipelines.models import chosen_step

DEFAULT_LIMIT = 20


def evaluate(
    model: str,
    /,
    *,
    data: Annotated[
        list[str] | None,
        Parameter(name=("--data", "--prompts"), metavar="[NAME=]FILE", negative=""),
    ] = None,
    num_prompts: int | None = None,
    against: str | None = None,
    to: Path | None = None,
    settings: AnswerSettings | None = None,
    folders: Given,
) -> Report:
    """Answer held-out prompts with a policy.

    Args:
        model: A run, RUN@STEP, models:/NAME@ALIAS, or a model directory.
        data: Rows, as of `train --data`, instead of the run's own sets; may be repeated.
        num_prompts: Answer only this many prompts of each set.
        against: Another model to compare on the same prompts, with the same verifier and sampling.
        to: Write every answer and its verdict to a new .lance, .parquet, .jsonl or .csv.
    """
    from pipelines.arguments import placed
    from pipelines.cli.reports import report_comparison, report_evaluation
    from pipelines.console.tables import check_table_file, write_table_file
    from pipelines.jobs.evaluate import answers_table, compare_by_set, compare_models, evaluate_all

    if to is not None:
        check_table_file(to)
    named = [folders.find(name) for name in ([model] if against is None else [against, model])]
    results = evaluate_all(
        [each.model() for each in named],
        [each.title for each in named],
        data=data or (),
        limit=num_prompts,
        settings=placed(settings or {}, section="evaluation"),
    )
    report = report_evaluation(results[-1])
    if against is not None:
        report = report_comparison(compare_models(*results), compare_by_set(*results), *results)
    if to is not None:
        table = answers_table(results)
        write_table_file(to, [table], table.schema)
    return report


def export(
    model: str,
    directory: Path,
    /,
    *,
    adapter: Flag = False,
    trajectories: Flag = False,
    format_: Annotated[Literal["datasets", "sft", "dpo"] | None, Parameter(name="--format")] = None,
    where: str | None = None,
    folders: Given,
) -> None:
    """Write a plain Hugging Face directory with a model card, or a run's trajectories as a dataset.

    Args:
        model: A run, RUN@STEP, models:/NAME@ALIAS, or a checkpoint directory.
        directory: A new directory.
        adapter: Write only the LoRA adapter, for `peft`.
        trajectories: Write the run's trajectories instead, for `datasets.load_dataset`.
        format_: With --trajectories: datasets (every column), or rows for TRL: sft (prompt and
            completion of those that passed), dpo (best and worst of each group).
        where: With --trajectories: SQL, as of the command trajectories.
    """
    if not trajectories and (format_ or where):
        raise ConfigError("--format and --where go with --trajectories")
    if trajectories and adapter:
        raise ConfigError("expected one of --adapter and --trajectories, found both")
    from pipelines import export as exports

    reference = folders.find(model)
    if trajectories:
        from areal_flow.log.queries import Run

        run = Run(reference.whole_run("export --trajectories").root)
        exports.export_trajectories(run, directory, form=format_ or "datasets", where=where)
    else:
        write = exports.export_adapter if adapter else exports.export_model
        write(reference.model(), directory, run=reference.layout)


def trajectories(
    run: str,
    /,
    *,
    where: str | None = None,
    sort: str | None = None,
    descending: Flag = False,
    limit: int | None = None,
    at: int | None = None,
    show: str | None = None,
    to: Path | None = None,
    tokens: Flag = False,
    folders: Given,
) -> Report:
    """List a run's trajectories, show one, or write them to a file.

    Columns for --where and --sort: those of schemas/rows.py and prompt, completion (text),
    status, step, reason, policy_version, verdict, passed, num_tokens, num_trained_tokens,
    num_masked_tokens, staleness, token_versions.

    Args:
        run: A run, or RUN@STEP for its state after that step.
        where: SQL: "reward = 1 AND completion LIKE '%9%'".
        sort: Sort by a column; nulls come last.
        descending: Largest first.
        limit: Maximum number of rows, 20 by default; 0: all.
        at: Show the state after this step.
        show: Show one trajectory in full, by its id or its # in the listing.
        to: Write all of them to a new .parquet, .jsonl or .csv.
        tokens: With --show: one line per token.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"--limit {limit}: expected 0 (all) or more")
    if tokens and not show:
        raise ConfigError("--tokens goes with --show")
    if show and to:
        raise ConfigError("expected one of --show and --to, found both")
    from areal_flow.log.browse import Selection, show_trajectory
    from areal_flow.log.queries import Run
    from pipelines.cli import trajectory_report as reports

    reference = folders.find(run)
    chosen, at = Run(reference.run.root), chosen_step(reference, at, option="--at")
    limit = limit if limit is not None else 0 if show or to else DEFAULT_LIMIT
    selection = Selection(where, sort, descending, limit or None)
    if to:
        return reports.export_trajectories(chosen, selection=selection, at=at, path=to)
    if show:
        shown = show_trajectory(chosen, show, selection=selection, at=at)
        return reports.report_trajectory(shown, by_token=tokens)
    return reports.report_listing(chosen, selection=selection, at=at)


def lineage(
    model: str, /, *, step: int | None = None, to: Path | None = None, folders: Given
) -> Report:
    """Show what a model version, or a step of a run, was made from.

    Args:
        model: A run, RUN@STEP, models:/NAME@ALIAS, models:/NAME/VERSION or a checkpoint directory.
        step: A step of the run; the last one by default.
        to: Write its trajectories to a new .parquet, .jsonl or .csv.
    """
    from pipelines.cli.reports import report_lineage
    from pipelines.console.tables import write_table_file
    from pipelines.models import trace_model

    traced = trace_model(folders.find(model), step=step)
    report = report_lineage(traced)
    if to:
        table = traced.lineage.trajectories("arrow")
        num_rows = write_table_file(to, [table], table.schema)
        message = f"{num_rows} trajectories of version {traced.lineage.version} in {to}"
        return replace(report, parts=[message])
    return report


def replay(
    run: str,
    /,
    *,
    step: int | None = None,
    from_: Annotated[int | None, Parameter(name="--from", metavar="CHECKPOINT_STEP")] = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", metavar="SECTION.KEY=VALUE", negative="")
    ] = None,
    loss: Annotated[str | None, Parameter(metavar="MODULE:FUNCTION")] = None,
    trajectories: int = 0,
    tokens: str | None = None,
    folders: Given,
) -> Report:
    """Replay a recorded step bit for bit, also with other settings.

    The exit code is 1 if the step differs from the ledger although it must not.

    Args:
        run: A run, or RUN@STEP.
        step: From 1 to the newest step of the ledger.
        from_: Start from this checkpoint; by default the newest usable one before the step.
        set_: Also compute the step with this setting; may be repeated.
        loss: Also compute it with this loss.
        trajectories: Show this many of the trajectories that differ most.
        tokens: Show the tokens of a trajectory, by its id.
    """
    from areal_flow.core.settings import import_function
    from areal_flow.flow.recovery.replay_settings import changed_recipe, parse_changes

    named, changes = folders.find(run), parse_changes(set_ or [])
    layout, step = named.run, chosen_step(named, step, option="--step")
    if step is None:
        raise ConfigError(f"expected a step to compute again: {run}@STEP, or --step N")
    changed_recipe(layout.config, changes)  # refuse wrong settings before heavy imports
    from areal_flow.flow.recovery.replay import replay_step
    from pipelines.cli.trajectory_report import report_replay

    replayed = replay_step(
        layout,
        step=step,
        from_checkpoint=from_,
        changes=changes,
        loss=import_function(loss, setting="--loss", error=ConfigError) if loss else None,
    )
    return report_replay(layout, replayed, num_trajectories=trajectories, tokens_of=tokens)


def difficulty(run: str, /, *, folders: Given) -> Report:
    """Show how pass rates are distributed over a run's prompts, for `prompts.difficulty`.

    Args:
        run: Run name, checkpoint directory or models:/NAME@ALIAS.
    """
    from areal_flow.log.queries import Run
    from pipelines.cli.reports import report_difficulty

    return report_difficulty(Run(folders.find(run).whole_run("difficulty").root))


def check(run: str, /, *, full: Flag = False, folders: Given) -> Report:
    """Audit a run: token accounting, hashes, versions, orphans. Exits with 1 if it finds anything.

    Args:
        run: Run name, checkpoint directory or models:/NAME@ALIAS.
        full: Also read again what the last clean audit verified.
    """
    from pipelines.cli.reports import report_check

    return report_check(folders.find(run).whole_run("check"), full=full)


def report(
    run: str,
    /,
    *,
    against: str | None = None,
    price: Prices = (),
    to: Path | None = None,
    folders: Given,
) -> Report:
    """Render a run as one HTML page that needs no network; also works during a run.

    Args:
        run: Run name, checkpoint directory or models:/NAME@ALIAS.
        against: Another run to show next to it.
        price: As in `cost`: 2.5 per GPU hour, or cpu=0.05; may be repeated.
        to: Output file, instead of report.html in the run directory.
    """
    from pipelines.costs import parse_prices
    from pipelines.pages.report import write_report

    layout = folders.find(run).whole_run("report")
    other = folders.find(against).whole_run("report") if against else None
    if to and (to.is_dir() or not to.parent.is_dir()):
        raise ConfigError(f"--to {to}: expected a file in a folder that exists")
    path = write_report(layout, to, against=other, prices=parse_prices(price))
    return Report({"run": layout.name, "file": path}, [f"{layout.name} on one page: {path}"])


def settings(section: str | None = None, /) -> Report:
    """List the settings of a recipe with type, default and meaning.

    Args:
        section: A section or a setting, by its dotted name; all by default.
    """
    return report_settings(section)


def verify(
    *,
    kind: Annotated[str | None, Parameter(metavar="NAME|MODULE:FUNCTION")] = None,
    source: Annotated[str | None, Parameter(metavar="harbor:FOLDER")] = None,
    settings: Annotated[str, Parameter(metavar="JSON")] = "{}",
) -> int | Report:
    """Score JSONL rows from standard input, one verdict per line; or try tasks with tests.

    A row has id, completion and what its verifier needs: reference; for code: mode, tests
    and entry_point. The exit code is 1 if a row got no score.

    Of each task, the solution must get the reward 1, and doing nothing 0; else the exit code is 1.

    Args:
        kind: Verifier: math, code, numeric, exact, regex, format, judge, reward_model,
            reasoning_gym, or your own.
        source: Tasks to try, instead of rows.
        settings: Keyword arguments of the verifier, as in a recipe: '{"pattern": "Answer: (.+)"}';
            of tasks those of workflow.sandbox: '{"provider": "docker"}'.
    """
    from pipelines.jobs.verify import read_lines, verify_lines

    if (kind is None) == (source is None):
        raise ConfigError("verify needs --kind NAME for rows, or --source harbor:FOLDER for tasks")
    try:
        chosen = TypeAdapter(dict[str, Any]).validate_json(settings)
    except ValidationError:
        raise ConfigError(f"--settings {settings!r}: expected a JSON object") from None
    if kind is None:
        return _tried_tasks(str(source), chosen)
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    are_scored = True
    for verdict in verify_lines(kind, read_lines(sys.stdin), settings=chosen):
        print(json.dumps(verdict), flush=True)
        are_scored &= verdict["score"] is not None
    return 0 if are_scored else 1


def _tried_tasks(source: str, settings: dict[str, Any]) -> Report:
    from areal_flow.sandboxes.registry import SandboxSettings
    from pipelines.jobs.verify_tasks import try_tasks

    name, _, folder = source.partition(":")
    if name != "harbor" or not folder:
        raise ConfigError(f"--source {source!r}: expected harbor:FOLDER")
    try:
        sandbox = SandboxSettings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"--settings {settings}: {error}") from None
    trials = asyncio.run(try_tasks(Path(folder).expanduser(), sandbox))
    rows = [{**asdict(trial), "seconds": round(trial.seconds, 2)} for trial in trials]
    num_bad = sum(bool(trial.problem) for trial in trials)
    last = (
        f"{len(trials)} tasks: {num_bad} may not be trained on"
        if num_bad
        else (f"{len(trials)} tasks: their solutions get 1, doing nothing 0")
    )
    return Report(rows, [Table(rows, prose=("problem",)), last], code=int(num_bad > 0))


COMMANDS = (
    *(evaluate, export, trajectories, lineage, difficulty, replay, check, report),
    *(settings, verify),
)
