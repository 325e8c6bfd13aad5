"""A run directory records its schema version; one of another version is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_flow
from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import SCHEMA_VERSION, RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.dataset import create_dataset
from areal_flow.log.directory import (
    check_schema_version,
    create_run,
    find_run,
    list_runs,
)
from areal_flow.log.ledger import STEPS


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "r")
    create_run(made, Recipe())
    return made


def test_new_run_can_be_opened_and_has_an_identity_of_its_own(layout: RunLayout) -> None:
    runs = layout.root.parent
    assert find_run(runs, "r") == layout
    assert areal_flow.open_run(layout.root).layout == layout
    other = RunLayout(runs / "s")
    create_run(other, Recipe())
    assert check_schema_version(layout) != check_schema_version(other)


@pytest.mark.parametrize(
    ("identity", "message"),
    [(None, "none"), ('{"schema_version": 1, "run_id": "x"}', "1")],
    ids=["written before there was a number", "another number"],
)
def test_run_of_another_schema_version_is_refused_at_every_door(
    layout: RunLayout, identity: str | None, message: str
) -> None:
    create_dataset(layout.steps, STEPS)
    if identity is None:
        layout.identity.unlink()
    else:
        layout.identity.write_text(identity)
    runs = layout.root.parent
    for door in (
        lambda: find_run(runs, "r"),  # every command
        lambda: areal_flow.open_run(layout.root),
        lambda: replay_step(layout, step=1),
    ):
        with pytest.raises(RunError) as refused:
            door()
        assert f"expected schema version {SCHEMA_VERSION} in" in str(refused.value)
        assert f"found {message}: read run r with the version of areal-flow that" in str(
            refused.value
        )


@pytest.mark.parametrize("identity", ["{", '{"schema_version": 5}', "5"])
def test_damaged_identity_is_called_damaged(layout: RunLayout, identity: str) -> None:
    layout.identity.write_text(identity)
    with pytest.raises(RunError, match=r"run\.json is damaged: expected schema_version and run_id"):
        areal_flow.open_run(layout.root)


def test_run_of_another_schema_version_does_not_hide_the_others(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    old = RunLayout(layout.root.parent / "old")
    create_run(old, Recipe())
    old.identity.unlink()
    assert list_runs(layout.root.parent) == [layout]
    assert "read run old with" in caplog.text


def test_ledger_alone_is_of_another_schema_version(tmp_path: Path) -> None:
    create_dataset(tmp_path / "old" / "steps.lance", STEPS)
    with pytest.raises(RunError, match="found none"):
        find_run(tmp_path, "old")
