"""A model version or a run in, what it was made from out: printed, as JSON, or in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_flow.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    read_checkpoint_state,
)
from areal_flow.errors import ModelError
from areal_flow.store.lineage import Lineage
from areal_flow.store.queries import Run
from areal_flow.tracking import RegisteredVersion, registered_version
from pipelines.assembly import default_tracking_uri
from pipelines.models import run_of_checkpoint
from pipelines.run_directory import find_run
from pipelines.table_file import write_table_file
from pipelines.terminal import make_console

_BARS = 30
_LAST_STEPS = 5


@dataclass(frozen=True, slots=True)
class Check:
    """A hash that was recorded elsewhere, and whether it is the ledger's."""

    what: str
    found: str
    expected: str

    @property
    def holds(self) -> bool:
        return self.found == self.expected


@dataclass(frozen=True, slots=True)
class Traced:
    """A lineage, how it was asked for, and what its hashes were compared with."""

    lineage: Lineage
    registered: RegisteredVersion | None
    checks: tuple[Check, ...]

    def summary(self) -> dict[str, Any]:
        """Return the lineage's summary with the registered version and the checks."""
        version = self.registered
        return {
            "registered": version
            and {"name": version.name, "version": version.version, "tags": version.tags},
            **self.lineage.summary(),
            "checks": [
                {"what": c.what, "found": c.found, "expected": c.expected, "holds": c.holds}
                for c in self.checks
            ],
        }


def trace(
    runs: Path, reference: str, *, step: int | None = None, registry: str | None = None
) -> Traced:
    """Return the lineage of a registered version, or of a run's step, by default its last.

    Args:
        reference: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, a run's name or its directory.
        registry: MLflow's address, if it is not the database beside the runs.

    Raises:
        ModelError: the registry does not know it, or it lies in no run.
        RunError: there is no such run or step.
    """
    if not reference.startswith("models:/"):
        return _traced(Run(find_run(runs, reference).root), step, None)
    version = registered_version(registry or default_tracking_uri(runs), reference)
    layout = run_of_checkpoint(version.source)
    if layout is None:
        raise ModelError(f"{reference} points to {version.source}, which lies in no run")
    return _traced(Run(layout.root), int(version.tags.get("step", version.source.name)), version)


def print_lineage(traced: Traced) -> None:
    """Print a lineage: numbers, the last steps, who sampled the tokens, and what holds."""
    console = make_console()
    console.print(_facts(traced))
    if traced.lineage.version > 0:
        console.print(_steps(traced.lineage))
        console.print(_policy_versions(traced.lineage))
    _print_checks(console, traced)


def print_lineage_json(traced: Traced) -> None:
    """Print a lineage as one JSON object."""
    print(json.dumps(traced.summary(), indent=2))


def export_lineage(traced: Traced, path: Path) -> None:
    """Write the trained trajectories, one row each without tokens, to a Parquet or JSONL file.

    Raises:
        ConfigError: the file's name will not do.
    """
    table = traced.lineage.trajectories("arrow")
    num_rows = write_table_file(path, [table], table.schema)
    print(f"{num_rows} trajectories of version {traced.lineage.version} in {path}")


def _traced(run: Run, step: int | None, version: RegisteredVersion | None) -> Traced:
    newest = run.steps("arrow", columns=["step"])["step"]
    if not len(newest):
        raise ModelError(f"{run.layout.name} has no policy yet: its ledger is empty")
    lineage = run.lineage(max(newest.to_pylist()) if step is None else step)
    return Traced(lineage, version, tuple(_checks(lineage, version)))


def _checks(lineage: Lineage, version: RegisteredVersion | None) -> Iterable[Check]:
    expected = lineage.steps.iloc[-1].weights_hash
    if version is not None:
        yield Check("the registered version", version.tags.get("weights_hash", "none"), expected)
    checkpoints = lineage.run.layout.checkpoints
    if lineage.version in list_checkpoints(checkpoints):
        state = read_checkpoint_state(checkpoint_path(checkpoints, lineage.version))
        yield Check("the checkpoint", state.weights_hash, expected)


def _facts(traced: Traced) -> Table:
    lineage = traced.lineage
    summary = lineage.summary()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if (version := traced.registered) is not None:
        table.add_row("registered", f"models:/{version.name}/{version.version}")
    for label, fact in (
        ("policy", f"version {summary['version']} of run {summary['run']}"),
        ("weights", _chain(summary)),
        ("steps", f"{summary['num_steps']}"),
        ("trajectories", f"{summary['num_trajectories']:,}, of {summary['num_prompts']:,} prompts"),
        ("tokens", _tokens(summary)),
        ("dataset", _dataset(summary)),
        ("verifier", _spans(summary["verifiers"], "verifier") or "none"),
        ("config", _spans(summary["config_hashes"], "config_hash")),
        ("code", _spans(summary["code_versions"], "code_version")),
        ("writer epoch", _spans(summary["writer_epochs"], "writer_epoch")),
        ("environment", _environments(summary["numeric_environments"])),
    ):
        table.add_row(label, fact)
    return table


def _chain(summary: dict[str, Any]) -> str:
    chain = f"{summary['weights_hash']}, from genesis {summary['genesis_hash']}"
    if not summary["chain_breaks"]:
        return f"{chain} by an unbroken chain"
    steps = ", ".join(map(str, summary["chain_breaks"]))
    forks = ", ".join(str(fork["step"]) for fork in summary["forks"]) or "none"
    return f"{chain}; broken before step {steps} (forks recorded: {forks})"


def _tokens(summary: dict[str, Any]) -> str:
    return f"{summary['num_trained_tokens']:,} trained, {summary['num_masked_tokens']:,} masked"


def _dataset(summary: dict[str, Any]) -> str:
    return (
        f"{summary['trajectory_watermark']:,} trajectories in the log, Lance version "
        f"{summary['lance_version']}"
    )


def _spans(records: Sequence[dict[str, Any]], name: str) -> str:
    """Return values with their steps; the only one needs none."""
    if len(records) == 1:
        return str(records[0][name])
    return "\n".join(f"{r[name]} (steps {r['first_step']} to {r['last_step']})" for r in records)


def _environments(records: Sequence[dict[str, Any]]) -> str:
    shown = [
        {**record, "text": ", ".join(f"{k} {v}" for k, v in record["numeric_environment"].items())}
        for record in records
    ]
    return _spans(shown, "text")


def _steps(lineage: Lineage) -> Table:
    steps = lineage.steps.iloc[1:]
    left_out = len(steps) - _LAST_STEPS
    title = f"the last {_LAST_STEPS} of {len(steps)} steps" if left_out > 0 else "its steps"
    table = _titled(title)
    for label in ("step", "from", "reward", "trained", "masked", "loss"):
        table.add_column(label, justify="right", no_wrap=True)
    for label in ("weights", "parent", "committed"):
        table.add_column(label, no_wrap=True)
    for row in steps.tail(_LAST_STEPS).itertuples():
        table.add_row(
            str(row.step),
            f"v{row.policy_version}",
            f"{row.reward_mean:.3f}",
            f"{row.num_trained_tokens:,}",
            f"{row.num_masked_tokens:,}",
            f"{row.loss:.4f}",
            row.weights_hash[:12],
            row.parent_hash[:12],
            f"{row.committed_at:%Y-%m-%d %H:%M:%S}",
        )
    return table


def _policy_versions(lineage: Lineage) -> Table:
    versions = lineage.policy_versions
    table = _titled("its tokens by the policy version that sampled them")
    for label in ("version", "trained", "masked"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BARS)
    most = max([1, *versions.num_trained_tokens])
    for row in versions.itertuples():
        bar = "█" * round(_BARS * row.num_trained_tokens / most)
        table.add_row(
            str(row.version), f"{row.num_trained_tokens:,}", f"{row.num_masked_tokens:,}", bar
        )
    return table


def _titled(title: str) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def _print_checks(console: Console, traced: Traced) -> None:
    console.print()
    for check in traced.checks:
        if check.holds:
            console.print(f"✓ {check.what} has the weights hash of the ledger", style="green")
        else:
            console.print(
                f"✗ {check.what} has weights {check.found}, the ledger {check.expected}",
                style="bold red",
            )
