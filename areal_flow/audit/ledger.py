"""Rules of the step ledger alone: its order, its chain of hashes, what only ever grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from areal_flow.audit.findings import LEDGER_CHANGED, Finding
from areal_flow.controller.records import batch_digest

Row = Mapping[str, Any]

_GROWING = (
    ("watermark-order", "trajectory_watermark"),
    ("cursor-order", "next_submission_index"),
    ("epoch-order", "writer_epoch"),
)


def check_ledger(rows: Sequence[Row], forks: Sequence[Row]) -> Iterator[Finding]:
    """Yield what is wrong with the ledger.

    Args:
        rows: sorted by step; a step may be missing or stand there twice.
        forks: lines of forks.jsonl.
    """
    yield from _check_order(rows)
    for row in rows:
        yield from _check_row(row)
    for before, row in pairwise(once(rows)):
        yield from _check_growth(before, row)
        if row["step"] == before["step"] + 1:
            yield from _check_parent(before, row, forks)
    yield from _check_forks(rows, forks)


def check_configuration(
    rows: Sequence[Row], *, config_hash: str, code_version: str
) -> Iterator[Finding]:
    """Yield rows that were made with other settings than config.toml's.

    Rows of another version of this program are left out: it may know other settings.
    """
    for row in rows:
        if row["code_version"] == code_version and row["config_hash"] != config_hash:
            yield Finding(
                "config-hash",
                place(row),
                f"the hash of config.toml, {config_hash}",
                row["config_hash"],
                "config.toml was changed: put its old settings back, a run keeps its recipe",
            )


def once(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each step."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row["step"], row)
    return list(first.values())


def place(row: Row) -> str:
    """Return how findings name a row."""
    return f"step {row['step']}"


def replayed(forks: Sequence[Row], step: int, kind: str) -> set[str]:
    """Return the hashes that replays of a step made elsewhere."""
    return {fork["replayed"][kind] for fork in forks if fork["step"] == step}


def _check_order(rows: Sequence[Row]) -> Iterator[Finding]:
    steps = [row["step"] for row in rows]
    if steps and steps[0] != 0:
        steps.insert(0, -1)
    for before, step in pairwise(steps):
        if step == before:
            expected, found = "one row a step", "another row of the same step"
            yield Finding("step-twice", f"step {step}", expected, found, LEDGER_CHANGED)
        elif step > before + 1:
            where, expected = f"step {step}", f"step {before + 1} before it"
            yield Finding("step-missing", where, expected, "no such row", LEDGER_CHANGED)


def _check_row(row: Row) -> Iterator[Finding]:
    version = max(0, row["step"] - 1)
    if row["policy_version"] != version:
        yield _ledger_finding("policy-version", row, str(version), row["policy_version"])
    digest = batch_digest(row["policy_version"], row["trajectory_ids"])
    if row["batch_digest"] != digest:
        yield _ledger_finding("batch-digest", row, digest, row["batch_digest"])
    if list(row["trajectory_ids"]) != sorted(row["trajectory_ids"]):
        yield _ledger_finding("batch-order", row, "trajectory ids ascending", "another order")
    if not row["step"] and (row["trajectory_ids"] or row["parent_hash"]):
        yield _ledger_finding("genesis", row, "no trajectories and no parent", "some")


def _check_growth(before: Row, row: Row) -> Iterator[Finding]:
    for rule, column in _GROWING:
        if row[column] < before[column]:
            at_least = f"{column} of at least {before[column]}"
            yield _ledger_finding(rule, row, at_least, row[column])


def _check_parent(before: Row, row: Row, forks: Sequence[Row]) -> Iterator[Finding]:
    known = {before["weights_hash"], *replayed(forks, before["step"], "weights_hash")}
    if row["parent_hash"] not in known:
        expected = f"weights_hash of {place(before)}, {before['weights_hash']}"
        yield _ledger_finding("parent-hash", row, expected, row["parent_hash"])


def _check_forks(rows: Sequence[Row], forks: Sequence[Row]) -> Iterator[Finding]:
    hashes = {row["step"]: row["weights_hash"] for row in rows}
    for fork in forks:
        recorded = fork["recorded"]["weights_hash"]
        if hashes.get(fork["step"]) != recorded:
            yield Finding(
                "fork-recorded",
                f"forks.jsonl, step {fork['step']}",
                f"the ledger's weights_hash, {hashes.get(fork['step'], 'none')}",
                recorded,
                LEDGER_CHANGED,
            )


def _ledger_finding(rule: str, row: Row, expected: str, found: object) -> Finding:
    return Finding(rule, place(row), expected, str(found), LEDGER_CHANGED)
