"""References to runs and models in every command that takes one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout
from areal_flow.policy.checkpoints import checkpoint_path, read_checkpoint_state
from areal_flow.tracking import mlflow
from pipelines.cli.main import main
from pipelines.models import find_reference
from tests.recorded_runs import make_recorded_run

REFERENCES = ("x", "runs/x", "x@0", "runs/x@0", "models:/m@best", "runs/x/checkpoints/00000000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run x, and its checkpoint 0 exported beside the runs under the same name."""
    folder = tmp_path_factory.mktemp("work")
    layout = make_recorded_run(folder / "runs" / "x")
    shutil.copytree(checkpoint_path(layout.checkpoints, 0), folder / "x")
    return folder


@pytest.fixture
def layout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLayout]:
    layout = RunLayout(folder / "runs" / "x")
    source = checkpoint_path(layout.checkpoints, 0)
    tags = {"weights_hash": read_checkpoint_state(source).weights_hash}
    version = SimpleNamespace(name="m", version="1", source=source, tags=tags)
    monkeypatch.setattr(mlflow, "registered_version", lambda *_: version)
    monkeypatch.chdir(folder)
    yield layout
    shutil.rmtree(folder / "out", ignore_errors=True)


@pytest.mark.parametrize("reference", REFERENCES)
def test_any_reference_resolves_to_run_step_and_model(layout: RunLayout, reference: str) -> None:
    resolved = find_reference(Path("runs"), reference)
    assert resolved.run == layout
    assert resolved.step == (None if reference.endswith("x") else 0)
    assert resolved.model() == checkpoint_path(layout.checkpoints, 0)
    assert resolved.title == f"{reference} (step 0 of run x)"


HEAVY = {
    "difficulty": "pipelines.cli.reports.report_difficulty",
    "evaluate": "pipelines.jobs.evaluate.evaluate_all",
    "replay": "areal_flow.flow.recovery.replay.replay_step",
    "report": "pipelines.pages.report.write_report",
    "track": "areal_flow.tracking.registry.track",
}
"""What commands call with the run or the model, where that takes long or needs more of a run."""


WHOLE_RUNS = ("check", "difficulty", "report", "track")
"""Commands that take no step."""


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(
    "command",
    [
        ["check"],
        ["trajectories", "--limit", "1"],
        ["lineage"],
        ["export", "out"],
        *([name] for name in HEAVY),
    ],
    ids=lambda command: command[0],
)
def test_every_command_takes_every_reference(
    layout: RunLayout,
    command: list[str],
    reference: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    subjects: list[Any] = []

    def record_subject(subject: Any, *_: Any, **__: Any) -> None:
        subject = subject[0] if isinstance(subject, list) else subject
        is_path = isinstance(subject, Path)
        subjects.append(subject if is_path else getattr(subject, "layout", subject).root)
        raise ArealFlowError("reached")

    name, *options = command
    if name in WHOLE_RUNS and "@0" in reference:
        assert main([name, reference, "--to", "u"][: 4 if name == "track" else 2]) == 2
        assert f"`{name}` takes a run, not step 0 of it" in capsys.readouterr().err
        return
    if name in HEAVY:
        monkeypatch.setattr(HEAVY[name], record_subject)
    given = {"replay": ["--step", "0"] if reference.endswith("x") else [], "track": ["--to", "u"]}
    code = main([name, reference, *options, *given.get(name, [])])
    if name in HEAVY:
        model = checkpoint_path(layout.checkpoints, 0)
        assert subjects == [model if name == "evaluate" else layout.root]
    elif name == "check":  # such a run lacks what a driver would have written beside its logs
        assert "Checked: 3 steps" in capsys.readouterr().out
    else:
        assert code == 0


def test_model_in_no_run_is_a_model_and_no_run(layout: RunLayout) -> None:
    resolved = find_reference(Path("runs"), "./x")
    assert resolved.model() == Path("x").resolve()
    assert resolved.title == "./x"
    with pytest.raises(ArealFlowError, match=r"expected a run or a model of one, found \./x"):
        _ = resolved.run


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["evaluate", "x@7"], "no checkpoint of version 7, only of 0"),
        (["lineage", "x@1", "--step", "2"], "--step 2: x@1 is step 1 already"),
        (["trajectories", "x@1", "--at", "2"], "--at 2: x@1 is step 1 already"),
        (["replay", "x"], "x@STEP, or --step N"),
        (["report", "y"], "expected a run named 'y' in runs, found: x"),
        (["report", "x@40"], "`report` takes a run, not step 40 of it: give x"),
        (["check", "runs/x@0"], "`check` takes a run, not step 0 of it: give runs/x"),
        (["difficulty", "x@1"], "`difficulty` takes a run, not step 1 of it: give x"),
    ],
)
def test_reference_that_does_not_fit_is_refused(
    layout: RunLayout, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) > 0
    assert message in capsys.readouterr().err
