"""The parts of the audit that need no run: what it keeps of a log, counts and reports."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lance.optimize import Compaction

from areal_flow.algorithms.staleness import trained_mask
from areal_flow.config import Recipe, dump_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import VersionSpan
from areal_flow.log.audit.files import (
    Batch,
    VersionGone,
    check_schema,
    leftovers,
    listed_checkpoints,
    read_directories,
    scan,
)
from areal_flow.log.audit.rules import ADVICE, MAX_PER_RULE, AuditDatabase, Finding, Report
from areal_flow.log.audit.run import MAX_READINGS, check_run
from areal_flow.log.codec import TRAJECTORIES, content_hashes
from areal_flow.log.dataset import open_dataset
from areal_flow.log.inputs import Verifier, record_inputs
from areal_flow.log.ledger import STEPS
from areal_flow.log.ledger_row import batch_digest
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.training.metrics import batch_metrics
from schemas import TrajectoryRow
from tests.recorded_runs import make_recorded_run
from tests.rows import commit, group_table, written_group

Rows = Sequence[dict[str, Any]]

SETTINGS = {
    "config_hash": "c",
    "code_version": "code",
    "seed": 0,
    "group_size": 2,
    "groups_per_step": 0,
    "max_staleness": 1,
}


VERIFIERS = [{"since_epoch": 1, "verifier": "numeric@0"}, {"since_epoch": 3, "verifier": "mine@1"}]


def judged(ledger: Rows, *logs: Rows, **settings: Any) -> list[Finding]:
    """Return the findings in a ledger and a log, which is read in parts."""
    with closing(AuditDatabase()) as database:
        database.add_ledger([pa.Table.from_pylist(list(ledger), schema=STEPS)])
        database.add("recipe", [SETTINGS | settings])
        database.add("verifiers", VERIFIERS)
        database.add("files", [{"kind": "checkpoint", "step": 0}][: len(ledger)])
        num_rows, findings = 0, list[Finding]()
        for rows in logs:
            table = sealed(pa.Table.from_pylist(list(rows), schema=TRAJECTORIES))
            order = range(num_rows, num_rows + len(rows))
            table = table.append_column("_rowid", pa.array(order, pa.uint64()))
            findings += database.add_trajectories(table)
            num_rows += len(rows)
        database.add("dataset", [{"num_rows": num_rows}])
        database.recount()
        return [*database.broken("ledger"), *findings, *database.broken("log")]


def sealed(table: pa.Table) -> pa.Table:
    """Return the rows with their current content hash."""
    at = table.schema.get_field_index("content_hash")
    return table.set_column(at, "content_hash", pa.array(content_hashes(table), pa.string()))


def step_row(step: int, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        **dict.fromkeys((name for name in STEPS.names if name.startswith("num_")), 0),
        "step": step,
        "policy_version": max(0, step - 1),
        "trajectory_ids": [],
        "discarded": [],
        "failed_submissions": [],
        "parent_hash": f"w{step - 1}" if step else "",
        "weights_hash": f"w{step}",
        "trajectory_watermark": 0,
        "next_submission_index": 100,
        "writer_epoch": 1,
        "config_hash": "c",
        "code_version": "code",
        "staleness_max": 0,
        "staleness_mean": 0.0,
        "reward_mean": 0.0,
        **values,
    }
    return row | {"batch_digest": batch_digest(row["policy_version"], row["trajectory_ids"])}


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


def trained_ages(row: dict[str, Any], *, policy_version: int, max_staleness: int) -> list[int]:
    """Return the staleness of each trained token, token by token."""
    spans = [VersionSpan(s["version"], s["length"]) for s in row["version_spans"]]
    versions = [version for version, length in spans for _ in range(length)]
    chosen = np.array(row["loss_mask"], np.bool_)
    mask = trained_mask(spans, chosen, policy_version=policy_version, max_staleness=max_staleness)
    return [policy_version - v for v, trained in zip(versions, mask, strict=True) if trained]


def test_metrics_of_a_batch_are_counted_again() -> None:
    rng = random.Random(0)
    rows = [
        row
        | {"source": "", "difficulty": index % 3, "finish_reason": rng.choice(["stop", "length"])}
        | {"output_tokens": [7] * (length := 1 + rng.randrange(9))}
        | {"version_spans": [{"version": 0, "length": length}]}
        | {"loss_mask": [True] * length, "behavior_logprobs": [-0.5] * length}
        for index in range(6)
        for row in group_table(index, rewards=rng.choices((0.0, 0.25, 1.0), k=3)).to_pylist()
    ]
    for row, reward in zip(rows, (0.1 + 0.2, 0.3, 0.3), strict=False):  # equal up to rounding
        row["reward"] = reward
    metrics = batch_metrics(rows, pass_threshold=0.5)
    step = {"trajectory_ids": [row["trajectory_id"] for row in rows], "trajectory_watermark": 18}

    def odd(metrics: dict[str, float]) -> list[Finding]:
        ledger = [step_row(0), step_row(1, **step, metrics=[*metrics.items()])]
        findings = judged(ledger, rows, pass_threshold=0.5)
        return [finding for finding in findings if finding.rule == "batch-metrics"]

    assert odd(metrics) == []
    assert len(metrics) == 10
    for name, value in metrics.items():
        (finding,) = odd({**metrics, name: value + 0.125})
        assert (finding.where, finding.expected) == ("step 1", f"{name} {value:.12g}, by the log")


@pytest.mark.parametrize("seed", range(5))
def test_log_without_tokens_counts_masked_ones(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, index) for index in range(20)]
    ages = [age for row in rows for age in trained_ages(row, policy_version=3, max_staleness=1)]
    num_tokens = sum(len(row["loss_mask"]) for row in rows)
    right = step_row(
        4,
        trajectory_ids=[row["trajectory_id"] for row in rows],
        trajectory_watermark=20,
        num_trained_tokens=len(ages),
        num_masked_tokens=num_tokens - len(ages),
        num_generated_tokens=num_tokens,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        reward_mean=1.0,
    )
    ignored = {"step-missing", "group-size", "batch-size", "newer-version", "versions-decrease"}
    assert {finding.rule for finding in judged([right], rows[:7], rows[7:])} <= ignored
    for column in ("num_trained_tokens", "num_masked_tokens", "staleness_mean", "staleness_max"):
        findings = judged([right | {column: right[column] + 1}], rows)
        (expected,) = [f.expected for f in findings if f.rule == "staleness-counts"]
        assert expected.startswith(f"{column} {right[column]:.12g}, ")


def test_empty_ledger_and_log_break_no_rule() -> None:
    assert judged([]) == []


def test_first_commit_of_an_id_wins() -> None:
    rows = group_table(0).to_pylist()
    again = [row | {"loss_mask": [True], "reward": None} for row in rows]
    ids = [row["trajectory_id"] for row in rows]
    counted = {"num_trained_tokens": 6, "reward_mean": 0.5, "num_generated_tokens": 6}
    step = step_row(1, trajectory_ids=ids, trajectory_watermark=2, **counted)
    findings = judged([step_row(0), step], rows, again, groups_per_step=1)
    assert [(f.rule, f.where) for f in findings] == [("trajectory-twice", i) for i in ids]


def test_ledger_may_end_anywhere_but_misses_nothing_between() -> None:
    rows = [step_row(step) for step in range(5)]
    assert judged(rows) == []
    assert judged(rows[:2]) == []
    assert [f.where for f in judged([rows[0], rows[3]])] == ["step 3"]
    assert [f.rule for f in judged(rows[1:])] == ["step-missing"]


def test_configuration_is_compared_where_this_program_wrote_the_row() -> None:
    rows = [step_row(0), step_row(1, config_hash="other", code_version="older")]
    assert judged(rows) == []
    findings = judged(rows, config_hash="d")
    assert [(finding.rule, finding.where) for finding in findings] == [("config-hash", "step 0")]


def test_log_probabilities_that_are_no_numbers_are_remembered() -> None:
    rows = group_table(0, rewards=(None, 1.0)).to_pylist()
    rows[1]["behavior_logprobs"][2] = float("-inf")
    ids = [row["trajectory_id"] for row in rows]
    findings = judged([step_row(0, trajectory_ids=ids, trajectory_watermark=2)], rows)
    places = {(f.rule, f.where) for f in findings}
    assert ("trained-not-finite", f"step 0, {ids[1]}") in places
    assert ("trained-unscored", f"step 0, {ids[0]}") in places
    assert ("reward-mean", "step 0") in places


def test_rows_with_holes_are_named_and_not_computed_with() -> None:
    def judge(table: pa.Table) -> tuple[list[str], pa.Table | None]:
        rows = table.append_column("_rowid", pa.array(range(len(table)), pa.uint64()))
        findings, usable = check_schema(Batch("here", rows), TrajectoryRow, kind="log")
        return [finding.actual for finding in findings], usable

    table = group_table(0).replace_schema_metadata(None)
    holes, usable = judge(table)
    assert not holes
    assert usable is not None
    assert usable["_rowid"].to_pylist() == [0, 1]
    holes, usable = judge(table.set_column(0, "trajectory_id", pa.array(["a", None])))
    assert holes
    assert usable is None
    hole = pa.array([[7, None, 7]] * 2, pa.list_(pa.int32()))
    at = table.column_names.index("output_tokens")
    assert judge(table.set_column(at, "output_tokens", hole))[1] is None
    assert judge(table.drop_columns(["seed"])) == (["missing or unknown columns: seed"], None)


def test_notes_do_not_make_a_run_unclean_and_many_findings_are_counted() -> None:
    report = Report("run")
    report.add(Finding("a-note", "", "", "", "", "note"))
    assert report.clean
    report.add(*(Finding("seed", str(n), "", "", "") for n in range(MAX_PER_RULE + 5)))
    report.add(Finding("group-id", "", "", "", ""))
    assert not report.clean
    more = {f.rule: f.where for f in report.findings if f.actual == "as above"}
    assert more == {"seed": "5 more places"}
    assert len(report.findings) == MAX_PER_RULE + 3


@pytest.fixture
def adapted(tmp_path: Path) -> RunLayout:
    """A run of an adapter with checkpoints 0, which has the base, and 1."""
    layout = make_recorded_run(tmp_path / "r", trainer={"lora": {"rank": 2}})
    first, second = (checkpoint_path(layout.checkpoints, step) for step in (0, 1))
    shutil.copytree(first, second)
    (second / "model.safetensors").unlink()
    state = json.loads((first / "state.json").read_text())
    (second / "state.json").write_text(json.dumps({**state, "step": 1}))
    record_inputs(layout, Recipe(), verifier=Verifier(), model=layout.model)
    (layout.model / "model.safetensors").unlink()
    return layout


def judged_checkpoints(layout: RunLayout) -> set[tuple[str, str, str]]:
    """Return rule, place and advice of each finding about checkpoints."""
    checkpoints = [*read_directories(layout, "checkpoint", listed_checkpoints(layout))]
    with closing(AuditDatabase()) as database:
        database.add_ledger([])
        database.add("checkpoints", [each for each in checkpoints if isinstance(each, dict)])
        broken = [*database.broken("files")]
    unreadable = [each for each in checkpoints if isinstance(each, Finding)]
    return {(each.rule, each.where, each.advice) for each in (*broken, *unreadable)}


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def test_adapter_is_not_blamed_for_the_base_that_it_adapts(adapted: RunLayout) -> None:
    first, second = listed_checkpoints(adapted)
    assert judged_checkpoints(adapted) == set()
    base = first / "model.safetensors"
    content = base.read_bytes()
    not_judged = ("not-judged", "checkpoint 1", ADVICE["unjudged"])
    for damage, rule in ((flip_a_byte, "weights"), (lambda path: path.write_bytes(b"0"), "")):
        damage(base)
        named = ("checkpoint-" + (rule or "unreadable"), "checkpoint 0", ADVICE["checkpoint"])
        assert judged_checkpoints(adapted) == {named, not_judged}
        base.write_bytes(content)
    flip_a_byte(second / "adapter.safetensors")
    own = ("checkpoint-weights", "checkpoint 1", ADVICE["checkpoint"])
    assert judged_checkpoints(adapted) == {own}


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_file_that_cannot_be_opened_is_no_reason_to_remove_its_checkpoint(
    adapted: RunLayout, name: str
) -> None:
    first, second = listed_checkpoints(adapted)
    shutil.rmtree(second)
    (first / name).unlink()
    (first / name).symlink_to(name)
    assert judged_checkpoints(adapted) == {
        ("checkpoint-unreadable", "checkpoint 0", ADVICE["closed"])
    }
    (first / name).unlink()
    assert judged_checkpoints(adapted) == {
        ("checkpoint-unreadable", "checkpoint 0", ADVICE["checkpoint"])
    }


def test_copy_of_the_tokenizer_is_no_reason_to_remove_a_checkpoint(adapted: RunLayout) -> None:
    first, _ = listed_checkpoints(adapted)
    (first / "config.json").write_text("{}")
    assert judged_checkpoints(adapted) == {
        ("checkpoint-model", "checkpoint 0", ADVICE["description"])
    }
    assert "remove" not in ADVICE["description"] + ADVICE["closed"] + ADVICE["unjudged"]


def test_leftovers_are_listed_while_directories_come_and_go(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    rest = layout.weights_of(1) / ".staged-00000005"
    rest.mkdir(parents=True)
    coming_and_going = [layout.weights_of(2), *(layout.checkpoints / str(i) for i in range(8))]
    ended = threading.Event()

    def prune() -> None:
        while not ended.is_set():
            for directory in coming_and_going:
                directory.mkdir(parents=True)
            for directory in coming_and_going:
                directory.rmdir()

    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        for _ in range(200):
            (leftover,) = leftovers(layout)
            assert (leftover.rule, leftover.where) == (
                "staged-weights",
                "weights/00000001/.staged-00000005",
            )
    finally:
        ended.set()
        pruning.join()


def test_verifier_is_the_one_that_was_accepted_for_its_writer() -> None:
    rows = [
        step_row(0, verifier="numeric@0"),
        step_row(1, verifier="numeric@0", writer_epoch=2),
        step_row(2, verifier="mine@1", writer_epoch=3),
        step_row(3, verifier="numeric@0", writer_epoch=4),
    ]
    log = group_table(0).to_pylist() + group_table(1, writer_epoch=3).to_pylist()
    findings = [f for f in judged(rows, log) if f.rule in ("verifier", "trajectory-verifier")]
    assert [(f.where, f.expected, f.actual) for f in findings] == [
        ("step 3", "mine@1", "numeric@0"),
        ("00000001-0000-00", "mine@1", "numeric@0"),
        ("00000001-0001-00", "mine@1", "numeric@0"),
    ]


def grown(layout: RunLayout) -> RunLog:
    """Return a log of three commits, which are three fragments."""
    create_logs(layout)
    log = RunLog(layout, Writer(layout.writers, 1))
    for index in range(3):
        commit(log, written_group(layout.trajectories, index))
    return log


def clean_up(path: Path) -> None:
    dataset = open_dataset(path)
    Compaction.commit(dataset, [t.execute(dataset) for t in Compaction.plan(dataset, {}).tasks])
    dataset.cleanup_old_versions(retain_versions=1)


def test_scan_says_that_its_version_was_cleaned_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    path = layout.trajectories
    grown(layout)
    monkeypatch.setattr("areal_flow.log.audit.files.BYTES_AT_ONCE", 1)  # a batch a batch
    batches = scan(path)
    first = next(batches)
    assert isinstance(first, Batch)
    assert len(first.rows) == 2
    clean_up(path)
    with pytest.raises(VersionGone):
        list(batches)
    assert sum(len(batch.rows) for batch in scan(path) if isinstance(batch, Batch)) == 6


def test_missing_fragment_of_a_version_that_is_there_is_a_finding(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    path = layout.trajectories
    grown(layout)
    next((path / "data").iterdir()).unlink()
    kinds = sorted(type(batch).__name__ for batch in scan(path))
    assert kinds == ["Batch", "Finding"]


@pytest.mark.parametrize("num_gone", [MAX_READINGS - 1, MAX_READINGS])
def test_run_is_read_again_if_its_version_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gone: int
) -> None:
    layout = RunLayout(tmp_path)
    layout.config.write_text(dump_recipe(Recipe()))
    grown(layout)
    undisturbed = check_run(layout)
    assert undisturbed.findings
    num_scans = 0

    def overtaken(
        path: Path, where: str | None = None, *, since: int = 0
    ) -> Iterator[Batch | Finding]:
        nonlocal num_scans
        if path == layout.trajectories:
            num_scans += 1
            if num_scans <= num_gone:
                raise VersionGone(path.name)
        yield from scan(path, where, since=since)

    monkeypatch.setattr("areal_flow.log.audit.run.scan", overtaken)
    report = check_run(layout)
    if num_gone < MAX_READINGS:
        assert report.as_json() == undisturbed.as_json()
    else:
        assert [finding.rule for finding in report.findings] == ["not-judged"]
        assert not report.clean
