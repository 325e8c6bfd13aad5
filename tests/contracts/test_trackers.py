"""Every sink is filled from the run alone: from where it stands, once or twice, late or again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from areal_flow.config import Recipe, TrackingSettings
from areal_flow.errors import ConfigError, RunError, StorageError
from areal_flow.layout import RunLayout
from areal_flow.store.ledger import STEPS
from areal_flow.testing import MemoryTracker
from areal_flow.tracking import track
from areal_flow.tracking.mlflow import MlflowTracker, registered_version
from areal_flow.tracking.projection import METRICS, Projection, step_metrics
from areal_flow.tracking.protocol import Tracker
from areal_flow.tracking.registry import make_tracker, start_tracking
from tests.checkpoints import write_fake_checkpoint
from tests.tracked_runs import BEGAN, append_steps, make_run, step_row


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "r")


def append_evaluation(layout: RunLayout, version: int, rewards: list[float | None]) -> None:
    answer = {
        "evaluation": "after",
        "policy_version": version,
        "writer_epoch": 1,
        "evaluated_at": BEGAN + timedelta(hours=1),
    }
    answer |= {"num_output_tokens": 4, "sample": 0}
    rows = [
        {**answer, "prompt_id": f"p{index}", "reward": reward}
        for index, reward in enumerate(rewards)
    ]
    table = pa.Table.from_pylist(rows)
    lance.write_dataset(table, str(layout.evaluations), mode="append")


class Kept:
    """What a sink kept, read back through its own door."""

    def __init__(self, sink: Any) -> None:
        if isinstance(sink, MemoryTracker):
            self.metrics = sink.metrics
            self.timestamps_ms = sink.timestamps_ms
            self.parameters = sink.parameters
            self.versions = {path.name: dict(sink.tags[path]) for path in sink.versions}
            self.current = sink.aliases["current"].name if "current" in sink.aliases else ""
            self.status, self.datasets = sink.status, sink.datasets
            return
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=sink.uri, registry_uri=sink.uri)
        run = client.get_run(sink.run_id)
        histories = {
            name: client.get_metric_history(sink.run_id, name) for name in run.data.metrics
        }
        for name, history in histories.items():
            assert len({m.step for m in history}) == len(history), f"{name} has a step twice"
        self.metrics = {name: {m.step: m.value for m in h} for name, h in histories.items()}
        self.timestamps_ms = {m.step: m.timestamp for m in histories["train/loss"]}
        self.parameters = run.data.params
        found = client.search_model_versions(f"run_id = '{sink.run_id}'")
        self.versions = {Path(v.source).name: dict(v.tags) for v in found}
        self.current = ""
        if found:
            version = client.get_model_version_by_alias(found[0].name, "current")
            self.current = Path(version.source).name
        self.status = run.info.status
        self.datasets = {int(d.dataset.digest[1:]) for d in run.inputs.dataset_inputs}


MakeSink = Callable[[], Tracker]


@pytest.fixture(params=["mlflow", "memory"])
def make_sink(request: pytest.FixtureRequest, layout: RunLayout) -> MakeSink:
    """Return how each driver's life makes the sink of the same run."""
    if request.param == "memory":
        memory = MemoryTracker()
        return lambda: memory
    uri = request.getfixturevalue("database")
    settings = TrackingSettings(registered_model=layout.root.parent.name)
    return lambda: make_tracker(layout, settings, uri)


def test_sink_shows_what_the_run_recorded(make_sink: MakeSink, layout: RunLayout) -> None:
    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    append_evaluation(layout, 3, [1.0, 0.25, None, 0.75])
    sink = make_sink()
    assert Projection(layout, sink).deliver() == 3
    sink.end("FINISHED")
    kept = Kept(sink)
    assert kept.metrics["train/loss"] == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert kept.metrics["rollout/reward_mean"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert kept.metrics["held_out/pass_rate"] == {3: 0.5}
    assert kept.metrics["held_out/reward_mean"] == pytest.approx({3: 2 / 3})
    for name in ("pass_rate", "reward_mean"):
        bounds = [kept.metrics[f"held_out/{name}{end}"][3] for end in ("_low", "", "_high")]
        assert bounds == sorted(set(bounds))
    assert set(METRICS.values()) <= set(STEPS.names)
    held_out = {name for name in kept.metrics if name.startswith("held_out/")}
    assert set(kept.metrics) == {*METRICS, *held_out}
    assert kept.timestamps_ms[2] == int((BEGAN.timestamp() + 2) * 1000), "the row's, not a clock's"
    assert kept.parameters["seed"] == "3"
    assert kept.parameters["trainer.learning_rate"] == str(Recipe().trainer.learning_rate)
    assert set(kept.versions) == {"00000000", "00000002"}
    assert kept.versions["00000002"] == {
        "step": "2",
        "run": "r",
        "weights_hash": "w2",
        "trajectories_version": "12",
        "trajectories_watermark": "200",
    }
    assert kept.current == "00000002"
    assert kept.datasets == {10, 12}
    assert kept.status == "FINISHED"


def test_later_driver_delivers_the_rest_and_nothing_twice(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    first = make_sink()
    assert Projection(layout, first).deliver() == 3
    first.end("KILLED")
    append_steps(layout, 4, 5)
    second = make_sink()
    assert Projection(layout, second).deliver() == 2
    assert Projection(layout, second).deliver() == 0
    kept = Kept(second)
    assert list(kept.metrics["train/loss"]) == [1, 2, 3, 4, 5]
    assert kept.status == "RUNNING"


def test_delivery_that_is_repeated_after_a_crash_changes_nothing(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    append_evaluation(layout, 3, [1.0])
    sink = make_sink()
    Projection(layout, sink).deliver()
    before = Kept(sink)
    metrics = step_metrics(step_row(3))
    sink.log_step(3, metrics, timestamp_ms=before.timestamps_ms[3])
    Projection(layout, make_sink()).deliver()
    assert vars(Kept(sink)) == vars(before)


def test_pruned_checkpoint_leaves_the_registry(make_sink: MakeSink, layout: RunLayout) -> None:
    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    sink = make_sink()
    projection = Projection(layout, sink)
    projection.deliver()
    shutil.rmtree(layout.checkpoints / "00000000")
    write_fake_checkpoint(layout, 3, weights_hash="w3")
    projection.deliver()
    assert set(Kept(sink).versions) == {"00000002", "00000003"}
    assert Kept(sink).current == "00000003"
    assert sink.model_version == "3"


def test_checkpoint_that_is_not_its_rows_is_not_registered(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    write_fake_checkpoint(layout, 1, weights_hash="w1")
    write_fake_checkpoint(layout, 2, weights_hash="of a fork")
    write_fake_checkpoint(layout, 9, weights_hash="beyond the ledger")
    sink = make_sink()
    Projection(layout, sink).deliver()
    assert set(Kept(sink).versions) == {"00000001"}


def test_ledger_that_lost_its_last_rows_is_delivered_again_from_its_head(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    sink = make_sink()
    sink.begin()
    sink.log_step(7, {"train/loss": 0.5}, timestamp_ms=0)
    projection = Projection(layout, make_sink())
    projection.deliver()
    append_steps(layout, 4)
    assert projection.deliver() == 1
    assert 4 in Kept(sink).metrics["train/loss"]


def test_metrics_map_is_shown_beside_the_fixed_columns() -> None:
    row = step_row(1, metrics=[("entropy", 0.5), ("tools/calls", 2)], loss=None)
    found = step_metrics(row)
    assert found["train/entropy"] == 0.5
    assert found["tools/calls"] == 2
    assert "train/loss" not in found
    assert step_metrics(step_row(1, metrics={"entropy": 0.5}))["train/entropy"] == 0.5


class Refusing(MemoryTracker):
    """A sink that answers, and refuses step 2."""

    def log_step(self, step: int, metrics: Mapping[str, float], *, timestamp_ms: int) -> None:
        if step == 2:
            raise ValueError("a name that this sink refuses")
        super().log_step(step, metrics, timestamp_ms=timestamp_ms)


def test_refused_step_is_left_out_and_the_next_ones_arrive(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Refusing()
    Projection(layout, sink).deliver()
    assert list(sink.metrics["train/loss"]) == [1, 3]
    assert "the tracker refused step 2, which is left out" in caplog.text


def test_checkpoint_with_an_alias_of_its_own_is_protected_in_mlflow(
    layout: RunLayout, database: str
) -> None:
    from mlflow import MlflowClient

    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    sink = make_tracker(layout, TrackingSettings(registered_model="m"), database)
    assert isinstance(sink, MlflowTracker)
    assert sink.is_reachable()
    Projection(layout, sink).deliver()
    assert sink.protected() == frozenset()
    client = MlflowClient(tracking_uri=database, registry_uri=database)
    client.set_registered_model_alias("m", "champion", "1")
    assert sink.protected() == {layout.checkpoints / "00000000"}
    assert (
        registered_version(database, "models:/m@champion").source == layout.checkpoints / "00000000"
    )
    assert (
        registered_version(database, "models:/m@current").source == layout.checkpoints / "00000002"
    )
    assert registered_version(database, f"models:/m/{sink.model_version}").source == (
        layout.checkpoints / "00000002"
    )


def test_run_can_be_tracked_anywhere_from_its_first_step(
    layout: RunLayout, database: str, tmp_path: Path
) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    assert track(layout.root, database) == 3
    assert track(layout.root, database) == 0
    moved = RunLayout(layout.root.rename(tmp_path / "renamed"))
    append_steps(moved, 4)
    assert track(moved.root, database) == 1
    sink = make_tracker(moved, TrackingSettings(), database)
    sink.begin()
    kept = Kept(sink)
    assert list(kept.metrics["train/loss"]) == [1, 2, 3, 4]
    assert list(kept.versions) == ["00000002"]


def test_tracking_nowhere_or_nothing_is_refused(layout: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"expected a tracker at http://127\.0\.0\.1:9"):
        track(layout.root, "http://127.0.0.1:9")
    with pytest.raises(RunError):
        track(tmp_path / "nobody", "sqlite://")
    recipe = Recipe(tracking=replace_settings(sink="nowhere"))
    with pytest.raises(ConfigError, match=r"'nowhere': expected one of \['mlflow'\]"):
        start_tracking(layout, recipe)


def replace_settings(**changes: Any) -> TrackingSettings:
    return TrackingSettings().model_copy(update=changes)
