"""`areal-flow runs remove`: asked on a terminal, refused while a driver lives."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from areal_flow.errors import RunError
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import hold_lease
from pipelines.cli.runs import remove_run
from tests.tracked_runs import make_run


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "runs" / "r")


def answered(answer: str, layout: RunLayout) -> subprocess.CompletedProcess[str]:
    """Remove a run at a terminal where somebody types an answer."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    command = (sys.executable, "-m", "pipelines.cli.main", "runs", "remove", layout.name)
    try:
        return subprocess.run(
            [*command, "--runs", str(layout.root.parent)],
            stdin=terminal,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_run_is_removed_by_yes_alone(layout: RunLayout) -> None:
    kept = answered("", layout)
    assert (kept.returncode, layout.steps.is_dir()) == (1, True)
    assert f"Remove run r (crashed) in {layout.root} and its model versions? [y/N]" in kept.stdout
    removed = answered("y", layout)
    assert removed.returncode == 0, removed.stderr
    assert "removed run r and its model versions: 0" in removed.stdout
    assert not list(layout.root.parent.iterdir()), "no database was made, no rest is left"


def test_run_of_a_living_driver_is_not_removed(layout: RunLayout) -> None:
    with hold_lease(layout.writers), pytest.raises(RunError, match=r"held by process .* stop it"):
        remove_run(layout)
    assert layout.steps.is_dir()
