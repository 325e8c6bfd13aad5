"""A run is copied, damaged in one place and audited: the rule that was broken is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from areal_flow.core.layout import RunLayout
from areal_flow.log.audit import files
from areal_flow.log.audit.files import Batch, scan
from areal_flow.log.audit.rules import ADVICE, Finding, rules_of
from areal_flow.log.audit.run import check_run
from areal_flow.log.dataset import COMMIT_ORDER
from pipelines.cli.main import main
from tests.integration.damages import (
    DAMAGES,
    Edit,
    Rows,
    checkpoint,
    edit_ledger,
    edit_log,
    newest_weights,
    put,
)
from tests.rows import written_group

RULE_FILES = ("prompts", "ledger", "trajectories", "log", "files")


@pytest.fixture
def layout(finished: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy, to be damaged."""
    shutil.copytree(finished.root, tmp_path / "copy")
    return RunLayout(tmp_path / "copy")


def check(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(layout.root), "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def rules(report: dict[str, Any], severity: str) -> set[str]:
    return {f["rule"] for f in report["findings"] if f["severity"] == severity}


def test_every_audit_rule_is_broken_by_some_damage() -> None:
    """Notes about leftovers of a crash have their own test."""
    damaged_rules = {rule for rule, _ in DAMAGES.values()}
    assert {rule for file in RULE_FILES for rule, _, _ in rules_of(file)} <= damaged_rules


IN_MEMORY = {name: edit for name, (_, edit) in DAMAGES.items() if isinstance(edit, Edit)}
ON_DISK = [name for name in DAMAGES if name not in IN_MEMORY]


@pytest.mark.parametrize("damage", IN_MEMORY)
def test_damaged_rows_are_detected(
    damage: str, finished: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit gets rows that differ from the stored ones; nothing is written."""
    changed = IN_MEMORY[damage].changed(finished)
    order = pa.array(range(len(changed)), pa.uint64())

    def scan_changed(path: Path, where: str | None = None) -> Iterator[Batch | Finding]:
        if path != IN_MEMORY[damage].path(finished):
            return scan(path, where)
        return iter([Batch(path.name, changed.append_column(COMMIT_ORDER, order))])

    monkeypatch.setattr("areal_flow.log.audit.run.scan", scan_changed)
    rules = {
        finding.rule for finding in check_run(finished).findings if finding.severity == "error"
    }
    assert DAMAGES[damage][0] in rules


@pytest.mark.parametrize(
    "damage",
    [
        *("a step is gone", "another token"),
        *(pytest.param(damage, marks=pytest.mark.slow) for damage in ON_DISK),
    ],
)
def test_damage_is_detected(
    damage: str, layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, do = DAMAGES[damage]
    do(layout)
    code, report = check(layout, capsys)
    assert rule in rules(report, "error"), report["findings"]
    assert code == 1
    assert not report["clean"]


@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        ("a checkpoint of another ledger", "disagree"),
        ("a checkpoint of another model", "description"),
        ("checkpoint weights changed", "checkpoint"),
        ("a checkpoint's file is cut", "checkpoint"),
    ],
)
def test_only_a_checkpoint_that_is_damaged_is_to_be_removed(
    damage: str, advice: str, layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, do = DAMAGES[damage]
    do(layout)
    _, report = check(layout, capsys)
    assert {f["advice"] for f in report["findings"] if f["rule"] == rule} == {ADVICE[advice]}


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_damaged_model_file_is_no_fault_of_the_checkpoints(
    file: str, layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    (layout.model / file).write_text("{")
    _, report = check(layout, capsys)
    assert "input-changed" in rules(report, "error")
    assert not [f for f in report["findings"] if "remove" in f["advice"]], report["findings"]


def test_valid_run_is_clean_and_counted(
    finished: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = check(finished, capsys)
    assert code == 0, report
    assert report["clean"]
    assert report["run"] == "small"
    assert rules(report, "note") <= {"orphan-fragments"}
    assert report["checked"]["steps"] == 7
    assert report["checked"]["trajectories"] >= 6 * 32
    assert report["checked"]["checkpoints"] == 4
    assert report["checked"]["published weights"] == 4
    assert report["checked"]["evaluation answers"] == 16
    assert main(["--runs", str(finished.root.parent), "check", "small"]) == 0
    assert "small: clean" in capsys.readouterr().out
    assert main(["check", "elsewhere"]) == 1
    assert "expected a run named 'elsewhere'" in capsys.readouterr().err


def test_leftovers_of_a_crash_are_notes(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    (layout.weights_of(1) / ".staged-00000005").mkdir()
    (layout.checkpoints / ".partial-00000005").mkdir()
    (layout.checkpoints / ".pruned-00000001").mkdir()
    written_group(layout.trajectories, 500)
    code, report = check(layout, capsys)
    assert code == 0
    assert rules(report, "note") == {
        "staged-weights",
        "partial-checkpoint",
        "pruned-checkpoint",
        "orphan-fragments",
    }


def test_run_that_is_being_prepared_is_no_damage(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (layout.steps, layout.checkpoints, layout.weights, layout.trajectories):
        shutil.rmtree(path)
    layout.inputs.unlink()
    code, report = check(layout, capsys)
    assert (code, rules(report, "note")) == (0, {"not-prepared"})


def test_more_trajectories_than_the_ledger_knows_are_no_damage(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_ledger(lambda rows: rows.pop())(layout)
    shutil.rmtree(checkpoint(layout, 6))
    shutil.rmtree(newest_weights(layout).parent)
    code, report = check(layout, capsys)
    assert code == 0, report["findings"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [(3, {"parent-hash", "weights-ledger"}), (2, {"parent-hash", "checkpoint-ledger"})],
)
def test_recorded_fork_explains_another_parent_and_other_weights(
    step: int, expected: set[str], layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: Rows = []
    edit_ledger(rows.extend)(layout)
    before, served = rows[step]["weights_hash"], rows[step]["served_hash"]
    edit_ledger(put(step, weights_hash="recorded", served_hash="elsewhere"))(layout)
    assert rules(check(layout, capsys)[1], "error") == expected
    fork = {
        "step": step,
        "recorded": {"weights_hash": "recorded"},
        "replayed": {"weights_hash": before, "served_hash": served},
    }
    layout.forks.write_text(json.dumps(fork) + "\n")
    code, report = check(layout, capsys)
    assert code == 0, report["findings"]


def test_replay_that_forks_during_an_audit_explains_the_weights_that_it_publishes(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = []
    edit_ledger(rows.extend)(layout)
    head = rows[-1]["step"]
    replayed = {name: rows[-1][name] for name in ("weights_hash", "served_hash")}
    edit_ledger(put(head, weights_hash="recorded", served_hash="recorded"))(layout)
    shutil.rmtree(checkpoint(layout, head))
    fork = {"step": head, "recorded": {"weights_hash": "recorded"}, "replayed": replayed}
    read_directories = files.read_directories

    def fork_and_read(*arguments: Any) -> Any:
        layout.forks.write_text(json.dumps(fork) + "\n")
        return read_directories(*arguments)

    monkeypatch.setattr(files, "read_directories", fork_and_read)
    report = check_run(layout)
    assert report.clean, report.findings


def test_findings_of_one_rule_are_bounded(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_seeds(rows: Rows) -> None:
        for row in rows:
            row["seed"] += 1

    edit_log(other_seeds)(layout)
    code = main(["check", str(layout.root)])
    printed = capsys.readouterr().out
    assert code == 1
    assert "more places" in printed
    assert "21 errors" in printed
