"""Rules between ledger and log: what was trained, discarded or given up, and that only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from areal_flow.algorithms.staleness import fresh_enough
from areal_flow.audit.findings import LEDGER_CHANGED, LOG_OR_LEDGER_CHANGED, Finding
from areal_flow.audit.ledger import Row, place
from areal_flow.audit.log import Log


def check_consumed_once(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield trajectories that two rows consume, or one row twice, and groups given up twice."""
    trained: dict[str, str] = {}
    discarded: dict[str, str] = {}
    given_up: dict[int, str] = {}
    for row in rows:
        for identifier in row["trajectory_ids"]:
            if identifier in trained:
                yield _twice("trained-twice", row, identifier, f"trained in {trained[identifier]}")
            trained.setdefault(identifier, place(row))
        for discard in row["discarded"]:
            identifier = discard["trajectory_id"]
            if identifier in discarded:
                earlier = f"discarded in {discarded[identifier]}"
                yield _twice("discarded-twice", row, identifier, earlier)
            discarded.setdefault(identifier, place(row))
        for index in row["failed_submissions"]:
            if index in given_up:
                yield _twice("given-up-twice", row, f"group {index}", f"in {given_up[index]}")
            given_up.setdefault(index, place(row))
    for identifier in sorted(trained.keys() & discarded.keys()):
        yield Finding(
            "trained-and-discarded",
            identifier,
            "either trained or discarded",
            f"trained in {trained[identifier]}, discarded in {discarded[identifier]}",
            LEDGER_CHANGED,
        )


def check_consumed_committed(rows: Sequence[Row], log: Log) -> Iterator[Finding]:
    """Yield consumed trajectories that are not in the log, or came after the row that names them.

    A group that was given up must not be in the log at all.
    """
    committed = set(log.submission_index_N.tolist())
    for row in rows:
        for identifier in _consumed(row):
            yield from _check_committed(row, identifier, log)
        for index in row["failed_submissions"]:
            if index in committed:
                where, found = f"{place(row)}, group {index}", "given up, and committed"
                expected = "one or the other"
                yield Finding("given-up-committed", where, expected, found, LOG_OR_LEDGER_CHANGED)


def check_position(rows: Sequence[Row], log: Log, *, num_rows: int) -> Iterator[Finding]:
    """Yield rows that claim more of the log than there is, or less than what had been submitted.

    Args:
        num_rows: of the dataset, those of superseded drivers included: watermarks count them.
    """
    order_N = np.argsort(log.commit_order_N)
    commits_N = log.commit_order_N[order_N]
    furthest_N = np.maximum.accumulate(log.submission_index_N[order_N])
    for row in rows:
        watermark, cursor = row["trajectory_watermark"], row["next_submission_index"]
        if watermark > num_rows:
            expected = f"a trajectory_watermark of at most {num_rows}, the rows of the log"
            yield _in_row("watermark-beyond-log", row, expected, str(watermark))
        num_before = int(np.searchsorted(commits_N, watermark))
        if num_before and furthest_N[num_before - 1] >= cursor:
            expected = f"a next_submission_index beyond {furthest_N[num_before - 1]}"
            yield _in_row("cursor-behind-log", row, expected, str(cursor))


def check_discards(rows: Sequence[Row], log: Log, *, max_staleness: int) -> Iterator[Finding]:
    """Yield discards whose reason does not hold."""
    for row in rows:
        for discard in row["discarded"]:
            for at in log.rows_of([discard["trajectory_id"]]):
                if not _reason_holds(discard["reason"], row, log, at, max_staleness):
                    where = f"{place(row)}, {discard['trajectory_id']}"
                    expected = "a reason that holds"
                    yield Finding(
                        "discard-reason", where, expected, discard["reason"], LOG_OR_LEDGER_CHANGED
                    )


def check_batch_size(rows: Sequence[Row], *, groups_per_step: int) -> Iterator[Finding]:
    """Yield steps that did not take as many groups as the recipe says."""
    for row in rows:
        num_groups = len({identifier.split("-")[0] for identifier in row["trajectory_ids"]})
        if row["step"] and num_groups != groups_per_step:
            yield _in_row("batch-size", row, f"{groups_per_step} groups", f"{num_groups} groups")


def _consumed(row: Row) -> list[str]:
    return [*row["trajectory_ids"], *(d["trajectory_id"] for d in row["discarded"])]


def _check_committed(row: Row, identifier: str, log: Log) -> Iterator[Finding]:
    where = f"{place(row)}, {identifier}"
    at = log.rows.get(identifier)
    if at is None:
        expected, found = "a trajectory of the log", "none of that id"
        yield Finding("unknown-trajectory", where, expected, found, LOG_OR_LEDGER_CHANGED)
    elif log.commit_order_N[at] >= row["trajectory_watermark"]:
        expected = f"committed before the row: below watermark {row['trajectory_watermark']}"
        found = f"commit order {log.commit_order_N[at]}"
        yield Finding("consumed-before-commit", where, expected, found, LOG_OR_LEDGER_CHANGED)


def _reason_holds(reason: str, row: Row, log: Log, at: int, max_staleness: int) -> bool:
    newest, policy_version = log.newest_version(at), row["policy_version"]
    match reason:
        case "stale":
            return not fresh_enough(
                newest, policy_version=policy_version, max_staleness=max_staleness
            )
        case "verifier_error":
            return bool(np.isnan(log.reward_N[at]))
        case "beyond_head":
            return bool(newest > policy_version)
        case _:
            return True


def _twice(rule: str, row: Row, what: str, earlier: str) -> Finding:
    return Finding(rule, f"{place(row)}, {what}", "once", f"also {earlier}", LEDGER_CHANGED)


def _in_row(rule: str, row: Row, expected: str, found: str) -> Finding:
    return Finding(rule, place(row), expected, found, LOG_OR_LEDGER_CHANGED)
