"""Rules of the books: every number of a ledger row, counted again from the log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from areal_flow.algorithms.staleness import count_staleness
from areal_flow.audit.findings import LOG_OR_LEDGER_CHANGED, Finding
from areal_flow.audit.ledger import Row, place
from areal_flow.audit.log import Log


def check_accounting(rows: Sequence[Row], log: Log) -> Iterator[Finding]:
    """Yield rows whose token accounts differ from the log's: generated, consumed, waiting.

    Args:
        rows: by step, each step once.
    """
    committed = _CommittedTokens(log)
    num_before = num_consumed = 0
    for row in rows:
        num_committed = committed.below(row["trajectory_watermark"])
        in_step = log.num_tokens(log.rows_of(row["trajectory_ids"]))
        discarded = log.num_tokens(log.rows_of(d["trajectory_id"] for d in row["discarded"]))
        num_consumed += in_step + discarded
        trained_or_masked = row["num_trained_tokens"] + row["num_masked_tokens"]
        for rule, expected, found in (
            ("step-tokens", in_step, trained_or_masked),
            ("generated-tokens", num_committed - num_before, row["num_generated_tokens"]),
            ("discarded-tokens", discarded, row["num_discarded_tokens"]),
            ("waiting-tokens", num_committed - num_consumed, row["num_waiting_tokens"]),
        ):
            if expected != found:
                yield _differs(rule, row, f"{expected} tokens, by the log", f"{found}")
        num_before = num_committed


def check_staleness(rows: Sequence[Row], log: Log, *, max_staleness: int) -> Iterator[Finding]:
    """Yield rows that trained tokens older than allowed, or that counted them otherwise."""
    for row in rows:
        if row["staleness_max"] > max_staleness:
            bound, found = f"at most {max_staleness}", f"{row['staleness_max']}"
            yield _differs("staleness-bound", row, bound, found)
        known = log.rows_of(row["trajectory_ids"])
        if row["trajectory_ids"] and len(known) == len(row["trajectory_ids"]):
            yield from _check_counts(row, log, known, max_staleness)


def check_trained(rows: Sequence[Row], log: Log) -> Iterator[Finding]:
    """Yield trained trajectories that no step may train, and rewards summed otherwise."""
    for row in rows:
        known = log.rows_of(row["trajectory_ids"])
        for at in known:
            yield from _check_trainable(row, log, at)
        rewards = log.reward_N[known]
        if known and not math.isclose(rewards.mean(), row["reward_mean"], abs_tol=1e-9):
            expected = f"{rewards.mean():.6g}, by the log"
            yield _differs("reward-mean", row, expected, f"{row['reward_mean']:.6g}")


def _check_counts(row: Row, log: Log, known: list[int], max_staleness: int) -> Iterator[Finding]:
    bound = {"policy_version": row["policy_version"], "max_staleness": max_staleness}
    counted = count_staleness((log.chosen_spans(at) for at in known), **bound)
    expected = {
        "num_trained_tokens": counted.num_trained,
        "num_masked_tokens": log.num_tokens(known) - counted.num_trained,
        "staleness_max": counted.staleness_max,
    }
    for column, value in expected.items():
        if row[column] != value:
            by_spans = f"{column} {value}, by version spans"
            yield _differs("staleness-counts", row, by_spans, str(row[column]))
    if not math.isclose(row["staleness_mean"], counted.staleness_mean, abs_tol=1e-9):
        by_spans = f"staleness_mean {counted.staleness_mean:.6g}, by version spans"
        yield _differs("staleness-counts", row, by_spans, f"{row['staleness_mean']:.6g}")


def _check_trainable(row: Row, log: Log, at: int) -> Iterator[Finding]:
    where = f"{place(row)}, {log.ids[at]}"
    newest = log.newest_version(at)
    if newest > row["policy_version"]:
        expected = f"tokens of version {row['policy_version']} or older"
        found = f"a token of version {newest}"
        yield Finding("newer-version", where, expected, found, LOG_OR_LEDGER_CHANGED)
    if math.isnan(log.reward_N[at]):
        yield Finding("trained-unscored", where, "a reward", "none", LOG_OR_LEDGER_CHANGED)
    if not log.finite_N[at]:
        expected, found = "finite log-probabilities", "infinities or NaN"
        yield Finding("trained-not-finite", where, expected, found, LOG_OR_LEDGER_CHANGED)


class _CommittedTokens:
    """Completion tokens of the log's first rows, by commit order."""

    def __init__(self, log: Log) -> None:
        order = np.argsort(log.commit_order_N)
        self._commits = log.commit_order_N[order]
        self._tokens = np.concatenate([[0], np.cumsum(log.num_tokens_N[order])])

    def below(self, watermark: int) -> int:
        return int(self._tokens[np.searchsorted(self._commits, watermark)])


def _differs(rule: str, row: Row, expected: str, found: str) -> Finding:
    return Finding(rule, place(row), expected, found, LOG_OR_LEDGER_CHANGED)
