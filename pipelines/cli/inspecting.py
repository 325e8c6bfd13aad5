"""The commands that read runs and models, from `evaluate` to `ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from areal_flow.errors import ConfigError
from pipelines.cli.settings import Flag, Given

DEFAULT_LIMIT = 20


def add_to(app: App) -> None:
    """Add the commands."""
    for command in (evaluate, export, trajectories, lineage, replay, check, runs, track, ui):
        app.command(command)


def evaluate(
    model: str, /, *, prompts: Path | None = None, num_prompts: int | None = None, folders: Given
) -> None:
    """Answer held-out prompts with a policy.

    Args:
        model: A run's name, models:/NAME@ALIAS, or a model directory.
        prompts: JSONL or Parquet, instead of the run's own.
        num_prompts: Answer only the first ones.
    """
    from pipelines.cli.reports import print_evaluation
    from pipelines.evaluate import evaluate_model
    from pipelines.models import find_model, title_of

    directory = find_model(folders.runs, model, registry=folders.registry)
    title = title_of(model, directory)
    found = evaluate_model(directory, prompts=prompts, limit=num_prompts, title=title)
    print_evaluation(found.table, title)


def export(model: str, directory: Path, /, *, folders: Given) -> None:
    """Write a plain Hugging Face directory.

    Args:
        model: A run's name, models:/NAME@ALIAS, or a checkpoint directory.
        directory: A new one.
    """
    from pipelines.models import export, find_model

    export(find_model(folders.runs, model, registry=folders.registry), directory)


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
) -> None:
    """List a run's trajectories, show one, or write them to a file.

    Columns for --where and --sort: those of schemas/trajectories.py, and prompt, completion (text),
    status, step, reason, policy_version, verdict, num_tokens, num_trained_tokens,
    num_masked_tokens, staleness, token_versions.

    Args:
        run: A run's name, or its directory.
        where: SQL: "reward = 1 AND completion LIKE '%9%'".
        sort: By a column; nulls come last.
        descending: The largest first.
        limit: How many, 20 by default; 0: all.
        at: As it stood after this step.
        show: One in full: its id, or its # in the listing.
        to: A new .parquet or .jsonl of them all.
        tokens: With --show: a line a token.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"--limit {limit}: expected 0 (all) or more")
    if tokens and not show:
        raise ConfigError("--tokens goes with --show")
    if show and to:
        raise ConfigError("expected one of --show and --to, found both")
    from areal_flow.recovery.run_directory import find_run
    from areal_flow.store.browsing import Selection
    from pipelines.cli import trajectory_report

    layout = find_run(folders.runs, run)
    everything = limit is None and (show or to)
    count = None if everything else DEFAULT_LIMIT if limit is None else limit or None
    selection = Selection(where, sort, descending, count)
    if to:
        trajectory_report.export_trajectories(layout, selection=selection, at=at, path=to)
    elif show:
        trajectory_report.print_trajectory(
            layout, selection=selection, at=at, which=show, by_token=tokens
        )
    else:
        trajectory_report.list_trajectories(layout, selection=selection, at=at)


def lineage(
    model: str,
    /,
    *,
    step: int | None = None,
    json: Flag = False,
    to: Path | None = None,
    folders: Given,
) -> int:
    """Show what a model version, or a step of a run, was made from.

    Args:
        model: models:/NAME@ALIAS, models:/NAME/VERSION, a run's name or its directory.
        step: Of a run; the last by default.
        json: As one JSON object.
        to: A new .parquet or .jsonl of its trajectories.
    """
    if step is not None and model.startswith("models:/"):
        raise ConfigError("--step goes with a run: a registered version is one step already")
    from pipelines.cli.lineage_report import export_lineage, print_lineage, print_lineage_json
    from pipelines.cli.table_file import refuse_target
    from pipelines.models import trace_model

    if to:
        refuse_target(to)
    traced = trace_model(folders.runs, model, step=step, registry=folders.registry)
    if json:
        print_lineage_json(traced)
    elif not to:
        print_lineage(traced)
    if to:
        export_lineage(traced, path=to)
    return int(not all(check.holds for check in traced.checks))


def replay(
    run: str,
    /,
    *,
    step: int,
    from_: Annotated[int | None, Parameter(name="--from", metavar="CHECKPOINT_STEP")] = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", metavar="SECTION.KEY=VALUE", negative="")
    ] = None,
    loss: Annotated[str | None, Parameter(metavar="MODULE:FUNCTION")] = None,
    trajectories: int = 0,
    tokens: str | None = None,
    json: Flag = False,
    folders: Given,
) -> int:
    """Compute a recorded step again, bit for bit, and what it would have been.

    The exit code is 1 if the step differs from the ledger where it must not.

    Args:
        run: A run's name.
        step: 1 to the ledger's newest.
        from_: Start from this checkpoint; the newest usable one below the step by default.
        set_: Compute the step a second time with this setting; may be given again.
        loss: Compute it a second time with this loss.
        trajectories: Show so many trajectories that differ most.
        tokens: Show a trajectory's tokens, by its id.
        json: Print one JSON object instead.
    """
    from areal_flow.recovery.replay_settings import changed_recipe, import_loss, parse_changes
    from areal_flow.recovery.run_directory import existing_run

    layout, changes = existing_run(folders.runs, run), parse_changes(set_ or [])
    changed_recipe(layout.config, changes)  # refuses a wrong one before anything heavy is imported
    from areal_flow.recovery.replay import replay_step
    from pipelines.cli.replay_report import print_json, print_report

    replayed = replay_step(
        layout,
        step=step,
        from_checkpoint=from_,
        changes=changes,
        loss=import_loss(loss) if loss else None,
    )
    print_results = print_json if json else print_report
    print_results(layout, replayed, num_trajectories=trajectories, tokens_of=tokens)
    return 1 if replayed.refused else 0


def check(run: str, /, *, json: Flag = False, folders: Given) -> int:
    """Audit a run: token accounting, hashes, versions, orphans. The exit code is 1 if it is wrong.

    Args:
        run: A run's name, or its directory.
        json: Print one JSON object.
    """
    from areal_flow.audit.run import check_run
    from areal_flow.recovery.run_directory import find_run
    from pipelines.cli.reports import print_check, print_check_json

    report = check_run(find_run(folders.runs, run))
    print_found = print_check_json if json else print_check
    print_found(report)
    return 0 if report.clean else 1


def runs(*, folders: Given) -> None:
    """List runs with their state."""
    from pipelines.cli.reports import print_runs

    print_runs(folders.runs)


def track(run: str, /, *, to: Annotated[str, Parameter(metavar="URI")], folders: Given) -> None:
    """Fill an MLflow server with a run's metrics and models, again from step 0.

    Args:
        run: A run's name, or its directory.
        to: The server's address.
    """
    from areal_flow.recovery.run_directory import find_run
    from areal_flow.tracking.registry import track

    num_steps = track(find_run(folders.runs, run).root, to)
    print(f"{to} has all of {run} now; it lacked {num_steps} steps")


def ui(*, port: int = 5000, folders: Given) -> None:
    """Serve the MLflow UI over the runs, on 127.0.0.1.

    Args:
        port: To listen on.
    """
    from pipelines.cli.ui import serve

    serve(folders.runs, port)
