"""Every tracker keeps what it was told; MLflow's also when its server is away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from areal_flow.spool import Spool
from areal_flow.testing import MemoryTracker
from areal_flow.tracking.mlflow import MlflowTracker, Tracker, model_source


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def mlflow_tracker(spool: Path, uri: str, name: str = "run") -> MlflowTracker:
    return MlflowTracker(spool, uri=uri, experiment="test", run_name=name, registered_model="m")


class Kept:
    """What a tracker kept, read back through its own door."""

    def __init__(self, tracker: Any) -> None:
        if isinstance(tracker, MemoryTracker):
            self.metrics = tracker.metrics
            self.parameters = tracker.parameters
            self.current = tracker.current
            self.tags = tracker.checkpoints.get(tracker.current or "", {})
            self.status = tracker.status
            self.num_datasets = len(tracker.datasets)
            return
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=tracker.uri, registry_uri=tracker.uri)
        run = client.get_run(tracker.run_id)
        self.metrics = {
            name: {m.step: m.value for m in client.get_metric_history(tracker.run_id, name)}
            for name in run.data.metrics
        }
        self.parameters = run.data.params
        version = client.get_model_version_by_alias("m", "current")
        self.current, self.tags = version.source.removeprefix("file://"), version.tags
        self.status = run.info.status
        self.num_datasets = len(run.inputs.dataset_inputs)


@pytest.fixture(params=["mlflow", "memory"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Tracker:
    if request.param == "memory":
        return MemoryTracker()
    return mlflow_tracker(tmp_path / "spool.jsonl", request.getfixturevalue("database"))


def test_everything_told_is_kept(tracker: Tracker, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "00000002"
    checkpoint.mkdir(parents=True)
    tracker.log_parameters({"seed": 3, "trainer.learning_rate": 1e-4})
    for step in (1, 2, 3):
        tracker.log_metrics(step, {"train/loss": 1 / step, "rollout/reward_mean": 0.1 * step})
    tracker.register_checkpoint(checkpoint, {"step": "2", "trajectories_version": "17"})
    tracker.log_dataset(tmp_path / "trajectories.lance", version=17, num_rows=512)
    tracker.close("FINISHED")
    kept = Kept(tracker)
    assert kept.metrics["train/loss"] == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert kept.parameters["trainer.learning_rate"] == "0.0001"
    assert kept.current == str(checkpoint)
    assert kept.tags == {"step": "2", "trajectories_version": "17"}
    assert kept.status == "FINISHED"
    assert kept.num_datasets == 1


def test_registered_model_leads_to_its_directory(tmp_path: Path, database: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    tracker = mlflow_tracker(tmp_path / "spool.jsonl", database)
    tracker.register_checkpoint(checkpoint, {})
    tracker.close("FINISHED")
    assert model_source(database, "models:/m@current") == checkpoint
    assert model_source(database, f"models:/m/{tracker.model_version}") == checkpoint


def test_checkpoint_with_an_alias_of_its_own_is_protected(tmp_path: Path, database: str) -> None:
    from mlflow import MlflowClient

    tracker = mlflow_tracker(tmp_path / "spool.jsonl", database, "protecting")
    paths = [tmp_path / f"{step:08d}" for step in (5, 10)]
    tracker.register_checkpoint(paths[0], {})
    wait_until(lambda: tracker.model_version is not None)
    client = MlflowClient(tracking_uri=database, registry_uri=database)
    client.set_registered_model_alias("m", "champion", tracker.model_version)
    tracker.register_checkpoint(paths[1], {})
    tracker.close("FINISHED")
    assert tracker.protected == {paths[0]}
    assert model_source(database, "models:/m@champion") == paths[0]


def wait_until(happened: Callable[[], bool]) -> None:
    until = monotonic() + 30
    while not happened():
        assert monotonic() < until
        sleep(0.05)


def test_events_wait_for_a_server_that_is_away(tmp_path: Path, database: str) -> None:
    spool = tmp_path / "spool.jsonl"
    away = mlflow_tracker(spool, "http://127.0.0.1:9", "late")
    began = monotonic()
    away.log_metrics(1, {"train/loss": 0.25})
    assert monotonic() - began < 0.5, "the training path waited for a network"
    away.register_checkpoint(tmp_path, {"step": "1"})
    away.close("FAILED", timeout_s=30)
    assert json.loads(spool.read_text().splitlines()[0])["step"] == 1
    back = mlflow_tracker(spool, database, "late")
    back.log_metrics(2, {"train/loss": 0.125})
    back.close("FINISHED")
    assert Kept(back).metrics["train/loss"] == {1: 0.25, 2: 0.125}


def test_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path: Path, database: str) -> None:
    spool = tmp_path / "spool.jsonl"
    first = mlflow_tracker(spool, database)
    first.log_metrics(1, {"a": 1.0})
    first.register_checkpoint(tmp_path, {})
    first.close("KILLED")
    second = mlflow_tracker(spool, database)
    second.log_metrics(2, {"a": 2.0})
    second.close("FINISHED")
    assert first.run_id == second.run_id
    kept = Kept(second)
    assert kept.metrics["a"] == {1: 1.0, 2: 2.0}
    assert kept.status == "FINISHED"


def test_spool_drops_a_torn_last_line_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "spool.jsonl"
    spool = Spool(path)
    for number in range(3):
        spool.append({"n": number})
    with path.open("a") as file:
        file.write('{"n": 3, "torn')
    reopened = Spool(path)
    reopened.append({"n": 4})
    events = list(reopened.pending())
    assert [event["n"] for event, _ in events] == [0, 1, 2, 4]
    reopened.confirm(events[1][1])
    assert [event["n"] for event, _ in Spool(path).pending()] == [2, 4]


def test_forgotten_checkpoint_leaves_the_registry(tmp_path: Path, database: str) -> None:
    from mlflow import MlflowClient

    tracker = mlflow_tracker(tmp_path / "spool.jsonl", database)
    old, new = tmp_path / "old", tmp_path / "new"
    tracker.register_checkpoint(old, {})
    tracker.register_checkpoint(new, {})
    tracker.forget_checkpoint(old)
    tracker.close("FINISHED")
    versions = MlflowClient(database, database).search_model_versions(
        f"run_id = '{tracker.run_id}'"
    )
    assert [version.source for version in versions] == [f"file://{new}"]


def test_thread_wakes_for_each_event(tmp_path: Path, database: str) -> None:
    tracker = mlflow_tracker(tmp_path / "spool.jsonl", database)
    spool = Spool(tmp_path / "spool.jsonl")
    for step in range(3):
        tracker.log_metrics(step, {"a": 1.0})
        deadline = monotonic() + 30
        while list(spool.pending()) and monotonic() < deadline:
            sleep(0.02)
        assert not list(spool.pending())
    tracker.close("FINISHED")


def test_refused_event_is_left_out_and_the_next_ones_arrive(
    tmp_path: Path, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = mlflow_tracker(tmp_path / "spool.jsonl", database)
    tracker.log_metrics(1, {"a": 1.0})
    tracker.log_metrics(2, {"a name that MLflow refuses: #?": 1.0})
    tracker.log_metrics(3, {"a": 3.0})
    tracker.register_checkpoint(tmp_path, {})
    tracker.close("FINISHED")
    assert Kept(tracker).metrics["a"] == {1: 1.0, 3: 3.0}
    assert "MLflow refused metrics" in caplog.text


def test_server_that_is_away_is_asked_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fail(self: MlflowTracker) -> None:
        attempts.append(monotonic())
        raise ConnectionError("away")

    monkeypatch.setattr(MlflowTracker, "_connect", fail)
    tracker = mlflow_tracker(tmp_path / "spool.jsonl", "http://127.0.0.1:9")
    for step in range(50):
        tracker.log_metrics(step, {"a": 1.0})
        sleep(0.01)
    assert len(attempts) <= 2
    tracker.close("FAILED")


def test_damaged_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "spool.jsonl"
    path.write_text('{"n": 0}\n{"n": 1, "to{"n": 2}\n{"n": 3}\n')
    assert [event["n"] for event, _ in Spool(path).pending()] == [0, 3]


def test_full_disk_loses_an_event_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool.jsonl")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    spool.append({"n": 1})
    assert "is lost" in caplog.text
