"""A traced lineage in, a page for the terminal out. No I/O but the printing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_flow.store.lineage import Lineage
from pipelines.lineage import Traced

_BARS = 30
_LAST_STEPS = 5
_MOST_ROWS = 12


def print_lineage(console: Console, traced: Traced) -> None:
    """Print a lineage: numbers, the last steps, who sampled the tokens, and what holds."""
    console.print(_facts(traced))
    if traced.lineage.version > 0:
        console.print(_steps(traced.lineage))
        console.print(_policy_versions(traced.lineage))
    _print_checks(console, traced)


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
        ("weights", summary["weights_hash"]),
        ("chain", _chain(summary)),
        ("steps", str(summary["num_steps"])),
        ("trajectories", f"{summary['num_trajectories']:,}, of {summary['num_prompts']:,} prompts"),
        ("tokens", _tokens(summary)),
        ("dataset", _dataset(summary)),
        ("verifier", _spans(summary["verifiers"], "verifier") or "none"),
        ("config", _spans(summary["config_hashes"], "config_hash")),
        ("code", _spans(summary["code_versions"], "code_version")),
        ("writer epoch", _spans(summary["writer_epochs"], "writer_epoch")),
        ("environment", _environments(summary["numeric_environments"])),
        ("forks", _forks(summary["forks"])),
    ):
        table.add_row(label, fact)
    return table


def _chain(summary: dict[str, Any]) -> str:
    chain = f"from the genesis {summary['genesis_hash']}"
    if not summary["chain_breaks"]:
        return f"{chain}, unbroken"
    return f"{chain}, broken before step {', '.join(map(str, summary['chain_breaks']))}"


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


def _forks(forks: Sequence[dict[str, Any]]) -> str:
    if not forks:
        return "none"
    steps = ", ".join(str(fork["step"]) for fork in forks)
    return f"replayed to other weights, in another numeric environment: steps {steps}"


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
    columns = ["version", "num_trained_tokens", "num_masked_tokens"]
    rows = bucketed(list(versions[columns].itertuples(index=False, name=None)))
    most = max([1, *(trained for _, trained, _ in rows)])
    for label, trained, masked in rows:
        table.add_row(label, f"{trained:,}", f"{masked:,}", "█" * round(_BARS * trained / most))
    return table


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
