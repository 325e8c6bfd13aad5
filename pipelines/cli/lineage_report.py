"""Prints what a policy version was made from, or writes its trajectories to a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_flow.store.lineage import Lineage
from pipelines.cli.table_file import write_table_file
from pipelines.cli.tables import Cell, make_console, print_facts, print_table
from pipelines.models import Traced

_BARS = 30
_LAST_STEPS = 5
_MOST_ROWS = 12


def print_lineage(traced: Traced) -> None:
    """Print a lineage: numbers, the last steps, who sampled the tokens, and what holds."""
    console = make_console()
    print_facts(console, _facts(traced))
    if traced.lineage.version > 0:
        _print_steps(console, traced.lineage)
        _print_policy_versions(console, traced.lineage)
    console.print()
    for check in traced.checks:
        if check.holds:
            console.print(f"✓ {check.what} has the weights hash of the ledger", style="green")
        else:
            said = f"✗ {check.what} has weights {check.found}, the ledger {check.expected}"
            console.print(said, style="bold red", soft_wrap=True)


def print_lineage_json(traced: Traced) -> None:
    """Print a lineage, the registered version and what its hashes were compared with as JSON."""
    version = traced.registered
    named = version and {"name": version.name, "version": version.version, "tags": version.tags}
    checks = [{**asdict(check), "holds": check.holds} for check in traced.checks]
    found = {"registered": named, **traced.lineage.summary(), "checks": checks}
    print(json.dumps(found, indent=2))


def export_lineage(traced: Traced, *, path: Path) -> None:
    """Write the trained trajectories, one row each without tokens, to a Parquet or JSONL file.

    Raises:
        ConfigError: the file's name will not do.
    """
    table = traced.lineage.trajectories("arrow")
    num_rows = write_table_file(path, [table], table.schema)
    print(f"{num_rows} trajectories of version {traced.lineage.version} in {path}")


def _facts(traced: Traced) -> list[tuple[str, Cell]]:
    found, version = traced.lineage.summary(), traced.registered
    chain, breaks = f"from the genesis {found['genesis_hash']}", found["chain_breaks"]
    broken = f"broken before step {', '.join(map(str, breaks))}" if breaks else "unbroken"
    tokens = f"{found['num_trained_tokens']:,} trained, {found['num_masked_tokens']:,} masked"
    return [
        *([("registered", f"models:/{version.name}/{version.version}")] if version else []),
        ("policy", f"version {found['version']} of run {found['run']}"),
        ("weights", found["weights_hash"]),
        ("chain", f"{chain}, {broken}"),
        ("steps", str(found["num_steps"])),
        ("trajectories", f"{found['num_trajectories']:,}, of {found['num_prompts']:,} prompts"),
        ("tokens", tokens),
        (
            "dataset",
            f"{found['trajectory_watermark']:,} trajectories in the log, Lance version "
            f"{found['lance_version']}",
        ),
        ("verifier", _spans(found["verifiers"], "verifier") or "none"),
        ("config", _spans(found["config_hashes"], "config_hash")),
        ("code", _spans(found["code_versions"], "code_version")),
        ("writer epoch", _spans(found["writer_epochs"], "writer_epoch")),
        ("environment", _environments(found["numeric_environments"])),
        ("forks", _forks(found["forks"])),
    ]


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


def _forks(forks: Sequence[dict[str, Any]]) -> str:
    if not forks:
        return "none"
    steps = ", ".join(str(fork["step"]) for fork in forks)
    return f"replayed to other weights, in another numeric environment: steps {steps}"


def _print_steps(console: Console, lineage: Lineage) -> None:
    steps = lineage.steps.iloc[1:]
    title = "its steps"
    if len(steps) > _LAST_STEPS:
        title = f"the last {_LAST_STEPS} of {len(steps)} steps"
    rows = [
        (
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
        for row in steps.tail(_LAST_STEPS).itertuples()
    ]
    labels = ("step", "from", "reward", "trained", "masked", "loss")
    print_table(console, (*labels, "weights", "parent", "committed"), rows, title=title)


def _print_policy_versions(console: Console, lineage: Lineage) -> None:
    columns = ["version", "num_trained_tokens", "num_masked_tokens"]
    found = lineage.policy_versions[columns].itertuples(index=False, name=None)
    rows = bucketed(list(found))
    most = max([1, *(trained for _, trained, _ in rows)])
    print_table(
        console,
        ("version", "trained", "masked", ""),
        [
            (label, f"{trained:,}", f"{masked:,}", "█" * round(_BARS * trained / most))
            for label, trained, masked in rows
        ],
        title="its tokens by the policy version that sampled them",
    )


def bucketed(rows: Sequence[tuple[int, int, int]]) -> list[tuple[str, int, int]]:
    """Sum versions with their neighbours until a screen holds them; label each with its range."""
    size = max(1, -(-len(rows) // _MOST_ROWS))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (
            str(part[0][0]) if len(part) == 1 else f"{part[0][0]} to {part[-1][0]}",
            sum(trained for _, trained, _ in part),
            sum(masked for _, _, masked in part),
        )
        for part in parts
    ]
