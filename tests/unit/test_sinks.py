"""Several sinks at once, sinks that are not installed, and secrets kept from sinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.config import Recipe, TrackingSettings, build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.tracking import registry, track
from areal_flow.tracking.folder_sinks import TensorboardTracker
from areal_flow.tracking.registry import RunTracking, make_trackers, start_tracking, untrack
from tests.fakes import MemoryTracker
from tests.kept import Kept
from tests.tracked_runs import append_steps, make_run


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "r")


def test_sinks_of_one_run_do_not_wait_for_each_other(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "WARN_EVERY_S", 0.0)
    away, here = MemoryTracker(), MemoryTracker()
    away.away = True
    layout.tracking.write_text('{"protected": ["00000001"]}')
    folder = TensorboardTracker(layout, TrackingSettings())
    tracking = RunTracking(layout, away, folder, here)
    tracking.wake()
    tracking.close("FINISHED")
    assert (here.delivered, here.status) == (3, "FINISHED")
    assert Kept(folder).status == "FINISHED"
    assert away.delivered == 0
    only = RunTracking(layout, folder)
    assert only.protected() == set(), "as the sink with a registry said last"


def test_sink_without_a_registry_releases_no_checkpoint(layout: RunLayout) -> None:
    layout.tracking.write_text('{"protected": ["00000001"]}')
    tracking = RunTracking(layout, TensorboardTracker(layout, TrackingSettings()))
    tracking.wake()
    tracking.close("FINISHED")
    assert tracking.protected() == {layout.checkpoints / "00000001"}


def test_run_can_be_shown_in_several_sinks_later_and_removed_from_all(layout: RunLayout) -> None:
    assert track(layout.root, "", sink="tensorboard,wandb") == 3
    append_steps(layout, 4)
    assert track(layout.root, "", sink="tensorboard") == 1
    (layout.tensorboard / "delivered.json").write_text("")
    assert track(layout.root, "", sink="tensorboard") == 4, "nobody knows what arrived"
    assert layout.wandb.is_dir()
    untrack(layout, Recipe(tracking=TrackingSettings(sink="tensorboard, wandb")))
    assert not layout.wandb.exists()
    assert not layout.tensorboard.exists()


def test_sink_that_is_not_installed_is_refused_with_its_extra(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        recipe = Recipe(tracking=TrackingSettings(sink=f"mlflow,{name}"))
        with pytest.raises(ConfigError, match=rf"expected the package {name}, .*\[{name}\]"):
            start_tracking(layout, recipe)


def test_password_of_a_tracker_reaches_no_file() -> None:
    given = {"tracking": {"uri": "https://me:secret@there"}}
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        build_recipe(given, source="recipe.toml")
    assert "secret" not in str(refused.value)


def test_environment_reaches_no_file_of_a_sink(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-key-of-forty-digits-0123456789abcd")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-a-judge")
    track(layout.root, "", sink="tensorboard,wandb")
    (wandb,) = make_trackers(layout, TrackingSettings(sink="wandb"), "")
    wandb.begin()
    wandb.end("FINISHED")
    files = [f for top in (layout.wandb, layout.tensorboard) for f in top.rglob("*") if f.is_file()]
    assert len(files) > 4
    for file in files:
        assert b"secret-" not in file.read_bytes(), file
