"""`areal-flow runs remove`: asks on a terminal, refuses while a driver is alive."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from pipelines.cli.main import main
from pipelines.cli.runs import remove_run
from tests.tracked_runs import make_run


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "runs" / "r")


def test_run_is_removed_by_yes_alone(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, questions = iter(["", "y"]), list[str]()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(
        "builtins.input", lambda question: questions.append(question) or next(answers)
    )
    command = ["runs", "remove", "r", "--runs", str(layout.root.parent)]
    assert (main(command), layout.steps.is_dir()) == (1, True)
    assert questions == [f"Remove run r (crashed) in {layout.root} and its model versions? [y/N] "]
    assert main(command) == 0
    assert "removed run r and its model versions: 0" in capsys.readouterr().out
    assert not list(layout.root.parent.iterdir()), "no database was made, no rest is left"


def test_run_is_removed_where_another_of_its_name_was_half_removed(layout: RunLayout) -> None:
    (layout.root.parent / ".removed-r" / "steps").mkdir(parents=True)
    remove_run(layout)
    assert not list(layout.root.parent.iterdir())


def test_prometheus_forgets_a_run_that_is_removed(layout: RunLayout) -> None:
    target = layout.root.parent / "prometheus" / "r.json"
    target.parent.mkdir()
    target.write_text("[]")  # of a driver that was killed
    remove_run(layout)
    assert not target.exists()


def test_run_of_a_living_driver_is_not_removed(layout: RunLayout) -> None:
    with hold_lease(layout.writers), pytest.raises(RunError, match=r"held by process .* stop it"):
        remove_run(layout)
    assert layout.steps.is_dir()
