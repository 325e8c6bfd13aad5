"""The audit's pure parts: what it keeps of a log, how it counts, how much it says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from areal_flow.algorithms.staleness import trainable_mask
from areal_flow.audit.accounting import check_staleness
from areal_flow.audit.findings import MAX_PER_RULE, Finding, Findings, Report
from areal_flow.audit.ledger import check_configuration, check_ledger
from areal_flow.audit.log import Log, join_logs, log_of, repeated_ids
from areal_flow.audit.tables import check_schema, conform
from areal_flow.controller.records import batch_digest
from areal_flow.store.codec import TRAJECTORIES
from areal_flow.types import VersionSpan
from schemas import TrajectoryRow
from tests.rows import group_table


def log_table(rows: list[dict[str, Any]]) -> pa.Table:
    table = pa.Table.from_pylist(rows, schema=TRAJECTORIES)
    return table.append_column("_rowid", pa.array(range(len(rows)), pa.uint64()))


def random_row(rng: random.Random, index: int) -> dict[str, Any]:
    row: dict[str, Any] = group_table(index).to_pylist()[0]
    spans = [(version, rng.randrange(5)) for version in range(rng.randrange(4))]
    length = sum(length for _, length in spans)
    return row | {
        "output_tokens": [1] * length,
        "behavior_logprobs": [-1.0] * length,
        "loss_mask": [rng.random() < 0.7 for _ in range(length)],
        "version_spans": [{"version": v, "length": n} for v, n in spans],
    }


@pytest.mark.parametrize("seed", range(5))
def test_log_without_tokens_counts_what_training_masks(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, index) for index in range(20)]
    log = join_logs([log_of(log_table(rows[:7])), log_of(log_table(rows[7:]))])
    trained = masked = 0
    for at, row in enumerate(rows):
        spans = [VersionSpan(s["version"], s["length"]) for s in row["version_spans"]]
        assert log.spans(at) == spans
        fresh = trainable_mask(spans, policy_version=3, max_staleness=1)
        kept = sum(f and chosen for f, chosen in zip(fresh, row["loss_mask"], strict=True))
        trained, masked = trained + kept, masked + len(fresh) - kept
    row = step_row(1, policy_version=3, trajectory_ids=[row["trajectory_id"] for row in rows])
    right = row | {"num_trained_tokens": trained, "num_masked_tokens": masked}
    assert "num_trained" not in said(check_staleness([right], log, max_staleness=1))
    wrong = right | {"num_trained_tokens": trained + 1}
    assert f"num_trained_tokens {trained}" in said(check_staleness([wrong], log, max_staleness=1))


def said(findings: Any) -> str:
    return " ".join(finding.expected for finding in findings)


def step_row(step: int, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "policy_version": max(0, step - 1),
        "trajectory_ids": [],
        "parent_hash": f"w{step - 1}" if step else "",
        "weights_hash": f"w{step}",
        "trajectory_watermark": step,
        "next_submission_index": step,
        "writer_epoch": 1,
        "config_hash": "c",
        "code_version": "code",
        "staleness_max": 0,
        "staleness_mean": 0.0,
        **values,
    }
    return row | {"batch_digest": batch_digest(row["policy_version"], row["trajectory_ids"])}


def test_empty_log_has_no_rows_and_no_findings() -> None:
    log = join_logs([])
    assert len(log) == 0
    assert list(repeated_ids(log)) == []
    assert list(check_ledger([], [])) == []


def test_first_commit_of_an_id_wins() -> None:
    part = log_of(log_table(group_table(1).to_pylist()))
    log: Log = join_logs([part, part])
    assert log.rows["00000001-0001-00"] == 1
    assert list(repeated_ids(log)) == ["00000001-0000-00", "00000001-0001-00"]


def test_ledger_may_end_anywhere_but_misses_nothing_between() -> None:
    rows = [step_row(step) for step in range(5)]
    assert list(check_ledger(rows, [])) == []
    assert list(check_ledger(rows[:2], [])) == []
    assert [f.where for f in check_ledger([rows[0], rows[3]], [])] == ["step 3"]
    assert [f.rule for f in check_ledger(rows[1:], [])] == ["step-missing"]


def test_configuration_is_compared_where_this_program_wrote_the_row() -> None:
    rows = [step_row(0), step_row(1, config_hash="other", code_version="older")]
    assert list(check_configuration(rows, config_hash="c", code_version="code")) == []
    found = check_configuration(rows, config_hash="d", code_version="code")
    assert [finding.where for finding in found] == ["step 0"]


def test_rows_with_holes_are_named_and_not_computed_with() -> None:
    table = group_table(0)
    assert conform(table, TrajectoryRow) is not None
    holes = table.set_column(0, "trajectory_id", pa.array(["a", None]))
    assert conform(holes, TrajectoryRow) is None
    fewer = table.drop_columns(["seed"])
    assert conform(fewer, TrajectoryRow) is None
    found = [f.found for f in check_schema(fewer, TrajectoryRow, where="here", advice="")]
    assert found == ["missing or unknown columns: seed"]


def test_log_probabilities_that_are_no_numbers_are_remembered() -> None:
    rows = group_table(0).to_pylist()
    rows[1]["behavior_logprobs"][2] = float("-inf")
    assert log_of(log_table(rows)).finite_N.tolist() == [True, False]
    assert np.isnan(log_of(log_table(group_table(0, rewards=(None,)).to_pylist())).reward_N).all()


def test_notes_do_not_make_a_run_unclean_and_many_findings_are_counted() -> None:
    found = Findings()
    found.add(Finding("a-note", "", "", "", "", "note"))
    assert Report("run", {}, found.all()).clean
    found.extend(Finding("seed", str(n), "", "", "") for n in range(MAX_PER_RULE + 5))
    report = Report("run", {}, found.all())
    assert not report.clean
    assert report.findings[-1].where == "5 more places"
    assert len(report.findings) == MAX_PER_RULE + 2
