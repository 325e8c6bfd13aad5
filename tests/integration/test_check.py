"""A run is copied, damaged in one place and audited: the rule that was broken is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from areal_flow.core.layout import RunLayout
from areal_flow.log.audit import files
from areal_flow.log.audit.files import Batch, scan
from areal_flow.log.audit.rules import ADVICE, Finding, Report, rules_of
from areal_flow.log.audit.run import check_run
from areal_flow.log.audit.verified import Verified, read_verified, record_verified
from areal_flow.log.dataset import COMMIT_ORDER
from areal_flow.log.settled import NOTHING_SETTLED, past_of
from pipelines.cli.main import main
from tests.integration.damages import (
    DAMAGES,
    Edit,
    Rows,
    add,
    checkpoint,
    edit_ledger,
    edit_log,
    newest_weights,
    put,
)
from tests.rows import written_group

RULE_FILES = ("prompts", "ledger", "trajectories", "log", "index", "files")


@pytest.fixture
def layout(finished: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy, to be damaged."""
    verdict = shutil.ignore_patterns(finished.verified.name)
    shutil.copytree(finished.root, tmp_path / "copy", ignore=verdict)
    return RunLayout(tmp_path / "copy")


def check(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(layout.root), "--json", *options])
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
    read_damaged(finished, damage, monkeypatch)
    assert DAMAGES[damage][0] in broken_rules(check_run(finished, full=True))


def read_damaged(run: RunLayout, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = IN_MEMORY[damage].changed(run)
    order = pa.array(range(len(changed)), pa.uint64())
    rows = changed.append_column(COMMIT_ORDER, order)

    def scan_changed(
        path: Path, where: str | None = None, *, since: int = 0
    ) -> Iterator[Batch | Finding]:
        if path != IN_MEMORY[damage].path(run):
            return scan(path, where, since=since)
        return iter([Batch(path.name, rows.slice(since))])

    monkeypatch.setattr("areal_flow.log.audit.run.scan", scan_changed)


def broken_rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings if finding.severity == "error"}


BASE = 1
BEFORE_BASE = {"the genesis is gone", "a genesis with a parent"}
"""Damages to what an audit of step 1 has verified."""


@pytest.mark.parametrize("damage", sorted(IN_MEMORY.keys() - BEFORE_BASE))
def test_rows_damaged_after_the_last_clean_audit_are_detected(
    damage: str, finished: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = past_of(finished, NOTHING_SETTLED, step=BASE)
    monkeypatch.setattr("areal_flow.log.audit.run.read_verified", lambda _: Verified(past))
    read_damaged(finished, damage, monkeypatch)
    report = check_run(finished)
    assert report.verified_before is not None
    assert DAMAGES[damage][0] in broken_rules(report)


def verify_until(layout: RunLayout, step: int) -> None:
    record_verified(layout, past_of(layout, NOTHING_SETTLED, step=step), evaluation_watermark=0)


def test_clean_audit_is_continued_by_the_next(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    _, full = check(layout, capsys, "--full")
    assert full["verified_before"] is None
    assert full["clean"]
    verified = json.loads(layout.verified.read_text())
    assert verified["past"]["step"] == full["checked"]["steps"] - 1
    verify_until(layout, 3)
    code, rest = check(layout, capsys)
    assert code == 0, rest["findings"]
    assert rest["verified_before"]["step"] == 3
    assert rest["checked"]["trajectories"] < full["checked"]["trajectories"]
    assert json.loads(layout.verified.read_text())["past"] == verified["past"]
    assert main(["check", str(layout.root)]) == 0
    printed = capsys.readouterr()
    assert "copy: clean" in printed.out
    assert f"trajectories up to step {verified['past']['step']} were verified at 20" in printed.out
    assert "trajectories" in printed.err


def test_damage_to_what_was_verified_is_found_by_a_full_audit_and_remembered(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_log(add(5, "seed", 1))(layout)
    verify_until(layout, 4)
    assert check(layout, capsys)[0] == 0
    assert rules(check(layout, capsys, "--full")[1], "error") == {"seed"}
    assert rules(check(layout, capsys)[1], "error") == {"seed"}


def other_program(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_flow.log.audit.verified.CODE_VERSION", "areal-flow 9")


def other_row(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_ledger(put(4, wait_s=9.0))(layout)


def other_inputs(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.inputs.write_text(layout.inputs.read_text() + "\n")


def shorter_log(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_log(lambda rows: rows.__delitem__(slice(9, None)))(layout)


@pytest.mark.parametrize("change", [other_program, other_row, other_inputs, shorter_log])
def test_audit_reads_everything_where_the_last_one_saw_something_else(
    change: Callable[[RunLayout, pytest.MonkeyPatch], None],
    layout: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify_until(layout, 4)
    assert read_verified(layout).past.step == 4
    change(layout, monkeypatch)
    assert read_verified(layout) == Verified()


def test_audit_of_a_directory_that_cannot_be_written_is_as_good(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("areal_flow.log.audit.verified.replace_file", refuse)
    assert check_run(layout).clean
    assert not layout.verified.exists()


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
    code, report = check(finished, capsys, "--full")
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
