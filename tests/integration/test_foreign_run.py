"""A foreign run directory is data: reading it executes no code from it."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path

import pytest

from areal_flow.config import load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.rewards.shipping import ship_function
from tests.integration.conftest import Typed

READING = (
    ("check", "RUN"),
    ("lineage", "RUN"),
    ("report", "RUN"),
    ("runs",),
    ("trajectories", "RUN"),
    ("trajectories", "RUN", "--to", "rows.parquet"),
    ("trajectories", "RUN", "--show", "1", "--tokens"),
    ("difficulty", "RUN"),
)
executed: list[str] = []


class Trap:
    """Unpickling it executes code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return executed.append, ("unpickled",)


def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


@pytest.fixture
def foreign(
    finished: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunLayout, str]:
    """A copy of a run whose recipe names code that is imported and code that is unpickled."""
    layout = RunLayout(tmp_path / "runs" / "foreign")
    shutil.copytree(finished.root, layout.root)
    shipped = ship_function(brevity, layout.rewards)
    for path in layout.rewards.glob("*.pickle"):
        path.write_bytes(pickle.dumps(Trap()))
    (tmp_path / "trap_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    text = layout.config.read_text()
    named = load_recipe(layout.config).rewards[0].verifier
    assert named in text
    layout.config.write_text(
        text.replace(f'"{named}"', f'"{shipped}"').replace(
            'name = "single_turn"', 'name = "imported"\npath = "trap_module:Trap"'
        )
    )
    recipe = load_recipe(layout.config)
    assert (recipe.workflow.name, recipe.rewards[0].verifier) == ("imported", shipped)
    return layout, shipped


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_reading_a_run_neither_unpickles_nor_imports_its_code(
    words: tuple[str, ...], foreign: tuple[RunLayout, str], typed: Typed, tmp_path: Path
) -> None:
    executed.clear()
    given = ["foreign" if word == "RUN" else word for word in words]
    done = typed(*given, cwd=tmp_path)
    assert not executed
    assert "trap_module" not in sys.modules
    # The audit finds that the recipe was changed.
    assert done.returncode == int(words[0] == "check"), done.stderr


def test_a_resume_says_first_that_it_executes_what_came_with_the_run(
    foreign: tuple[RunLayout, str], typed: Typed, tmp_path: Path
) -> None:
    _, shipped = foreign
    done = typed("train", "--resume", "foreign", cwd=tmp_path)
    source = f"rewards/{shipped.removeprefix('shipped:')}.py"
    assert f"This executes code that came with the run directory: {source}" in done.stdout
    assert done.returncode == 1  # the pickle is not what its hash says
    assert not executed
