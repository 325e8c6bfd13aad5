"""Every sink is filled from the run alone: from its cursor, once, twice, late or again."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import mlflow
import pyarrow as pa
import pytest
from mlflow import MlflowClient

from areal_flow.config import Recipe, TrackingSettings
from areal_flow.core.errors import ConfigError, ModelError, RunError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.core.program import CODE_VERSION
from areal_flow.log.inputs import Verifier, accept
from areal_flow.log.ledger import STEPS
from areal_flow.log.queries import Run
from areal_flow.policy.checkpoints import checkpoint_path, record_fork
from areal_flow.tracking import track
from areal_flow.tracking.folder_sinks import FolderTracker
from areal_flow.tracking.mlflow import KIND_TAG, MlflowTracker, registered_version
from areal_flow.tracking.projection import METRICS, Projection, step_metrics
from areal_flow.tracking.protocol import StepMetrics, Tracker
from areal_flow.tracking.registry import RunTracking, make_trackers, start_tracking, untrack
from tests.checkpoints import write_fake_checkpoint
from tests.fakes import MemoryTracker
from tests.kept import Kept
from tests.policies import write_model_directory
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
        "held_out": HELD_OUT,
        "verifier": "numeric@0",
        "difficulty": 2,
        "prompt": "1 + 1 =",
        "answer": "2",
        "completion": f"of version {version}",
        "policy_version": version,
        "writer_epoch": 1,
        "evaluated_at": BEGAN + timedelta(hours=1, seconds=version),
    }
    answer |= {"num_output_tokens": 4, "sample": 0, "reward_detail": "{}"}
    rows = [
        {**answer, "prompt_id": f"p{index}", "reward": reward}
        for index, reward in enumerate(rewards)
    ]
    table = pa.Table.from_pylist(rows)
    lance.write_dataset(table, str(layout.evaluations), mode="append")


MakeSink = Callable[[], Tracker]


def make_tracker(layout: RunLayout, settings: TrackingSettings, uri: str) -> Tracker:
    (tracker,) = make_trackers(layout, settings, uri)
    return tracker


@pytest.fixture(params=["mlflow", "memory", "tensorboard", "wandb"])
def make_sink(request: pytest.FixtureRequest, layout: RunLayout) -> MakeSink:
    """Return a function that makes a sink of the same run for each driver."""
    if request.param == "memory":
        memory = MemoryTracker()
        return lambda: memory
    uri = request.getfixturevalue("database") if request.param == "mlflow" else ""
    settings = TrackingSettings(sink=request.param, registered_model=layout.root.parent.name)
    return lambda: make_tracker(layout, settings, uri)


@pytest.fixture
def make_registry(make_sink: MakeSink) -> MakeSink:
    """Return the same for a sink with a model registry."""
    if isinstance(make_sink(), FolderTracker):
        pytest.skip("this sink has no registry")
    return make_sink


def test_sink_shows_what_the_run_recorded(make_sink: MakeSink, layout: RunLayout) -> None:
    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    append_evaluation(layout, 3, [1.0, 0.25, None, 0.75])
    append_evaluation(layout, 2, [1.0])
    sink = make_sink()
    assert Projection(layout, sink).deliver() == 3
    assert "current" not in Kept(sink).aliases, "the run has not finished"
    sink.end("FINISHED")
    kept = Kept(sink)
    assert kept.metrics["train/loss"] == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert kept.metrics["rollout/reward_mean"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert kept.metrics["held_out/pass_rate"] == {2: 1.0, 3: 0.5}
    assert kept.metrics["held_out/reward_mean"] == pytest.approx({2: 1.0, 3: 2 / 3})
    for name in ("pass_rate", "reward_mean"):
        bounds = [kept.metrics[f"held_out/{name}{end}"][3] for end in ("_low", "", "_high")]
        assert bounds == sorted(set(bounds))
    assert set(METRICS.values()) <= set(STEPS.names)
    held_out = {name for name in kept.metrics if name.startswith("held_out/")}
    assert set(kept.metrics) == {*METRICS, *held_out, "rollout/pass_rate"}
    assert kept.timestamps_ms[2] == int((BEGAN.timestamp() + 2) * 1000), "the row's, not a clock's"
    assert kept.parameters["seed"] == "3"
    assert kept.parameters["trainer.learning_rate"] == str(Recipe().trainer.learning_rate)
    assert kept.status == "FINISHED"
    if isinstance(sink, FolderTracker):
        return
    assert set(kept.versions) == {"00000000", "00000002"}
    assert kept.versions["00000002"] == {
        "step": "2",
        "run": "r",
        "weights_hash": "w2",
        "trajectories_watermark": "200",
        "trained_at": "2026-01-01T00:00:02+00:00",
        "rollout_pass_rate": "0.500000",
        "held_out_pass_rate": "1.000000",
    }
    assert kept.aliases == dict.fromkeys(("r", "current", "best"), "00000002")


def test_sink_says_what_the_run_is(make_sink: MakeSink, layout: RunLayout) -> None:
    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    sink = make_sink()
    Projection(layout, sink).deliver()
    kept = Kept(sink)
    expected = {"recipe": "sums", "model": "tiny", "verifier": "numeric@0"}
    expected["host"] = socket.gethostname()
    expected |= {"code_version": CODE_VERSION, "recipe_digest": Recipe(seed=3).digest()}
    assert expected.items() <= kept.tags.items()
    assert str(layout.root) in kept.text
    assert tomllib.loads(kept.recipe)["seed"] == 3
    assert len(kept.datasets) == 1, "one, whatever checkpoints there are"
    with hold_lease(layout.writers) as writer:
        accept(layout, Verifier("numeric@1"), writer)
    later = make_sink()
    Projection(layout, later).deliver()
    assert Kept(later).tags["verifier"] == "numeric@1"
    assert Kept(later).datasets == kept.datasets


def test_sink_shows_answers_of_policies_to_one_prompt_and_replaces_them(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    sink = make_sink()
    projection = Projection(layout, sink)
    for version in (0, 2, 3):
        append_evaluation(layout, version, [0.25 if version == 0 else 1.0, None])
        projection.deliver()
    rows = Kept(sink).samples
    assert [row["completion"] for row in rows] == [f"of version {v}" for v in (0, 2, 3)]
    expected = {"policy_version": 0, "prompt": "1 + 1 =", "answer": "2", "reward": 0.25}
    assert {name: str(rows[0][name]) for name in expected} == {
        n: str(v) for n, v in expected.items()
    }
    assert [str(row["passed"]) for row in rows] == ["False", "True", "True"]


def test_examples_are_of_policies_evenly_spaced_and_of_one_prompt_a_difficulty(
    layout: RunLayout,
) -> None:
    for version in range(24):
        append_evaluation(layout, version, [1.0, 0.0])
    sink = MemoryTracker()
    Projection(layout, sink).deliver()
    assert [row["policy_version"] for row in sink.samples] == [0, 3, 6, 9, 12, 15, 18, 21, 23]


def test_evaluations_are_read_and_delivered_once_each(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    num_texts: list[int] = []

    class Counting(MemoryTracker):
        def log_steps(self, steps: Sequence[StepMetrics]) -> None:
            self.delivered = steps[-1].step

        def log_evaluation(self, policy_version: int, *metrics: Any, **at: Any) -> None:
            versions.append(policy_version)

    def evaluations(run: Run, *arguments: Any, **options: Any) -> Any:
        rows = read(run, *arguments, **options)
        num_texts.append(len(rows) if "completion" in options["columns"] else 0)
        return rows

    read = Run.evaluations
    monkeypatch.setattr(Run, "evaluations", evaluations)
    projection = Projection(layout, Counting())
    for version in range(5):
        append_evaluation(layout, version, [1.0, 0.0])
        projection.deliver()
    assert versions == [0, 1, 2, 3, 4]
    assert max(num_texts) == 5, "texts of one prompt"
    append_evaluation(layout, 4, [1.0])  # as a driver that resumes may
    projection.deliver()
    assert versions == [0, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_experiment_opens_in_the_view_of_model_training(layout: RunLayout, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    old, chosen = TrackingSettings(experiment="old"), TrackingSettings(experiment="chosen")
    client.create_experiment("old")
    client.create_experiment("chosen", tags={KIND_TAG: "genai_development"})
    for settings in (TrackingSettings(), old, chosen):
        sink = make_tracker(layout, settings, uri)
        sink.begin()
    kinds = {
        experiment.name: experiment.tags.get(KIND_TAG) for experiment in client.search_experiments()
    }
    assert kinds["areal-flow"] == kinds["old"] == "custom_model_development"
    assert kinds["chosen"] == "genai_development", "a user's own choice stays"


@pytest.mark.slow
def test_artifacts_lie_beside_the_database_and_go_with_the_run(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sink = make_tracker(layout, TrackingSettings(), f"sqlite:///{tmp_path / 'mlflow.db'}")
    Projection(layout, sink).deliver()
    recipes = [*(tmp_path / "mlflow-artifacts").rglob("recipe.toml")]
    assert len(recipes) == 1
    assert sink.remove() == 0
    assert not recipes[0].exists()
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_registered_version_says_how_to_use_it_and_completes_prompts(
    layout: RunLayout, database: str
) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    directory = checkpoint_path(layout.checkpoints, 2)
    write_model_directory(directory)
    append_evaluation(layout, 2, [1.0])
    name = layout.root.parent.name
    settings = TrackingSettings(registered_model=name)
    Projection(layout, make_tracker(layout, settings, database)).deliver()
    client = MlflowClient(database, database)
    (version,) = client.search_model_versions(f"name = '{name}'")
    reference = f"models:/{name}/1"
    assert "after step 2; held-out pass rate 1.000000" in version.description
    assert f"areal-flow lineage {reference}" in version.description
    mlflow.set_registry_uri(database)
    mlflow.set_tracking_uri(database)
    try:
        policy = mlflow.pyfunc.load_model(reference)
    finally:
        mlflow.set_registry_uri(None)
        mlflow.set_tracking_uri(None)
    assert policy.metadata.signature.params.params[0].default == Recipe().generation.max_new_tokens
    (one,) = policy.predict(["1 + 1 ="], params={"max_new_tokens": 1})
    (more,) = policy.predict(["1 + 1 ="], params={"max_new_tokens": 4})
    assert more.startswith(one)
    assert len(more) > len(one)


def test_page_of_a_run_is_kept_and_replaced(layout: RunLayout, database: str) -> None:
    sink = MlflowTracker(layout, TrackingSettings(), database)
    layout.report.write_text("before it was tracked")
    sink.show_report(layout.report)
    for page in ("first", "second"):
        layout.report.write_text(page)
        track(layout.root, database)
    sink.begin()
    kept = MlflowClient(database, database).download_artifacts(sink.run_id, "report.html")
    assert Path(kept).read_text() == "second"


def test_full_disk_is_reported_in_one_line_without_the_sql_statement(
    layout: RunLayout, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = MlflowTracker(layout, TrackingSettings(), database)
    sink.begin()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with suppress(Exception):
            Projection(layout, sink).deliver()
        tracking = RunTracking(layout, sink)
        tracking.close("FAILED")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the tracker" in caplog.text
    assert not [each for each in caplog.messages if "\n" in each or "SQL:" in each], caplog.text
    assert "Traceback" not in caplog.text


def test_removed_run_is_new_to_its_sink(make_registry: MakeSink, layout: RunLayout) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    sink = make_registry()
    Projection(layout, sink).deliver()
    assert (sink.remove(), sink.remove()) == (1, 0)
    again = make_registry()
    assert Projection(layout, again).deliver() == 3
    assert Kept(again).aliases == {"r": "00000002"}


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


def test_repeated_delivery_after_a_crash_changes_nothing(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    append_evaluation(layout, 3, [1.0])
    sink = make_sink()
    Projection(layout, sink).deliver()
    before = Kept(sink)
    metrics = step_metrics(step_row(3))
    sink.log_steps([StepMetrics(3, metrics, before.timestamps_ms[3])])
    again = make_sink()
    Projection(layout, again).deliver()
    assert vars(Kept(again)) == vars(before)


def test_pruned_checkpoint_leaves_the_registry(make_registry: MakeSink, layout: RunLayout) -> None:
    for step in (0, 2):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    sink = make_registry()
    projection = Projection(layout, sink)
    projection.deliver()
    shutil.rmtree(layout.checkpoints / "00000000")
    write_fake_checkpoint(layout, 3, weights_hash="w3")
    projection.deliver()
    assert set(Kept(sink).versions) == {"00000002", "00000003"}
    assert Kept(sink).aliases == {"r": "00000003"}
    assert sink.model_version == "3"


def test_checkpoint_that_is_not_its_rows_is_not_registered(
    make_registry: MakeSink, layout: RunLayout
) -> None:
    write_fake_checkpoint(layout, 1, weights_hash="w1")
    write_fake_checkpoint(layout, 2, weights_hash="of a fork")
    write_fake_checkpoint(layout, 9, weights_hash="beyond the ledger")
    sink = make_registry()
    Projection(layout, sink).deliver()
    assert set(Kept(sink).versions) == {"00000001"}


def test_checkpoint_of_a_recorded_fork_is_registered(
    make_registry: MakeSink, layout: RunLayout
) -> None:
    write_fake_checkpoint(layout, 2, weights_hash="of a fork")
    replayed = {"weights_hash": "of a fork", "served_hash": "s"}
    record_fork(layout.forks, {"step": 2, "replayed": replayed})
    sink = make_registry()
    Projection(layout, sink).deliver()
    assert set(Kept(sink).versions) == {"00000002"}


def test_ledger_that_lost_its_last_rows_is_delivered_again_from_its_head(
    make_sink: MakeSink, layout: RunLayout
) -> None:
    sink = make_sink()
    sink.begin()
    sink.log_steps([StepMetrics(7, {"train/loss": 0.5}, 0)])
    later = make_sink()
    projection = Projection(layout, later)
    projection.deliver()
    append_steps(layout, 4)
    assert projection.deliver() == 1
    assert 4 in Kept(later).metrics["train/loss"]


def test_metrics_map_is_shown_beside_the_fixed_columns() -> None:
    row = step_row(1, metrics=[("entropy", 0.5), ("tools/calls", 2)], loss=None)
    metrics = step_metrics(row)
    assert metrics["train/entropy"] == 0.5
    assert metrics["tools/calls"] == 2
    assert "train/loss" not in metrics
    assert step_metrics(step_row(1, metrics={"entropy": 0.5}))["train/entropy"] == 0.5


def test_steps_of_a_long_run_arrive_by_few_requests(
    layout: RunLayout, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_points = list[int]()
    log_batch = MlflowClient.log_batch

    def counting(self: MlflowClient, run_id: str, metrics: Sequence[Any] = (), **rest: Any) -> None:
        num_points.append(len(metrics))
        log_batch(self, run_id, metrics, **rest)

    sink = MlflowTracker(layout, TrackingSettings(), database)
    sink.begin()
    monkeypatch.setattr(MlflowClient, "log_batch", counting)
    metrics = {f"train/{index}": 0.5 for index in range(300)}
    sink.log_steps([StepMetrics(step, metrics, 0) for step in range(1, 9)])
    assert num_points == [900, 900, 600]
    logged = MlflowClient(database).get_metric_history(sink.run_id, "train/299")
    assert [metric.step for metric in logged] == [*range(1, 9)]
    assert MlflowTracker(layout, TrackingSettings(), database).begin() == 8


class Refusing(MemoryTracker):
    """A reachable sink that refuses step 2."""

    def log_steps(self, steps: Sequence[StepMetrics]) -> None:
        if 2 in [each.step for each in steps]:
            raise ValueError("a name that this sink refuses")
        super().log_steps(steps)


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
    assert registered_version(database, "models:/m@r").source == layout.checkpoints / "00000002"
    assert registered_version(database, f"models:/m/{sink.model_version}").source == (
        layout.checkpoints / "00000002"
    )


def deliver(
    root: Path, database: str, step: int, *, rate: float, status: str = "FINISHED"
) -> MlflowTracker:
    """Deliver a run with one checkpoint and this many right answers of ten."""
    layout = make_run(root)
    write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    append_evaluation(layout, step, [float(n < 10 * rate) for n in range(10)])
    return deliver_again(layout, database, status=status)


def deliver_again(layout: RunLayout, database: str, *, status: str = "FINISHED") -> MlflowTracker:
    sink = make_tracker(layout, TrackingSettings(registered_model="several"), database)
    assert isinstance(sink, MlflowTracker)
    Projection(layout, sink).deliver()
    sink.end(status)
    return sink


def test_runs_share_a_registry_and_each_keeps_its_alias(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"

    def run_at(alias: str) -> str:
        return registered_version(database, f"models:/several@{alias}").tags["run"]

    first = deliver(tmp_path / "first", database, 1, rate=0.6)
    assert (run_at("first"), run_at("current"), run_at("best")) == ("first",) * 3
    deliver(tmp_path / "stopped", database, 3, rate=0.2, status="KILLED")
    assert (run_at("stopped"), run_at("current"), run_at("best")) == ("stopped", "first", "first")
    deliver(tmp_path / "v1", database, 2, rate=0.9, status="FAILED")
    assert (run_at("current"), run_at("best")) == ("first", "v1")
    second = deliver(tmp_path / "second", database, 2, rate=0.9)
    assert (run_at("current"), run_at("best")) == ("second", "v1"), "of equals the first"
    deliver_again(RunLayout(tmp_path / "first"), database)
    assert run_at("current") == "second", "delivered again, it takes nothing from a newer run"
    assert (first.protected(), second.protected()) == (frozenset(), frozenset())
    assert deliver_again(RunLayout(tmp_path / "v1"), database, status="FAILED").protected() == {
        tmp_path / "v1" / "checkpoints" / "00000002"
    }


@pytest.mark.slow
def test_removed_run_leaves_nothing_and_takes_nothing_of_others(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"
    kept = deliver(tmp_path / "kept", database, 1, rate=0.1)
    gone = deliver(tmp_path / "gone", database, 2, rate=0.9)
    assert gone.remove() == 1
    assert gone.remove() == 0
    for alias in ("gone", "current"):
        with pytest.raises(ModelError):
            registered_version(database, f"models:/several@{alias}")
    for alias in ("kept", "best"):
        assert registered_version(database, f"models:/several@{alias}").tags["run"] == "kept"
    assert Kept(kept).status == "FINISHED"


def test_run_that_was_never_tracked_makes_no_database(layout: RunLayout, tmp_path: Path) -> None:
    assert untrack(layout, Recipe()) == 0
    assert not (tmp_path / "mlflow.db").exists()
    away = Recipe(tracking=replace_settings(uri="http://127.0.0.1:9"))
    with pytest.raises(StorageError, match="Nothing was removed"):
        untrack(layout, away)


def test_short_timeouts_are_set_only_during_a_request_to_mlflow(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, retries = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    monkeypatch.delenv(timeout, raising=False)
    monkeypatch.setenv(retries, "7")
    seen: list[tuple[str | None, str | None]] = []
    from mlflow import MlflowClient

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append((os.environ.get(timeout), os.environ.get(retries)))
        return []

    monkeypatch.setattr(MlflowClient, "search_experiments", watched)
    before = dict(os.environ)
    for uri in ("http://127.0.0.1:1", f"sqlite:///{layout.root}/mlflow.db"):
        assert MlflowTracker(layout, TrackingSettings(), uri).is_reachable()
    assert seen == [("5", "7"), (None, "7")], "a value of the user's own is kept"
    assert dict(os.environ) == before


def test_evaluations_without_a_row_yet_are_delivered_when_they_have_one(layout: RunLayout) -> None:
    append_evaluation(layout, 0, [1.0])
    lance.dataset(str(layout.evaluations)).delete("true")
    sink = MemoryTracker()
    projection = Projection(layout, sink)
    projection.deliver()
    assert "held_out/pass_rate" not in sink.metrics
    append_evaluation(layout, 0, [1.0])
    projection.deliver()
    assert "held_out/pass_rate" in sink.metrics


@pytest.mark.slow
def test_run_of_a_name_that_another_folder_has_gets_another_alias(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"
    here = deliver(tmp_path / "a" / "sums", database, 1, rate=0.1)
    there = deliver(tmp_path / "b" / "sums", database, 2, rate=0.2)
    assert here.alias == "sums"
    assert (there.alias or "").startswith("sums-")
    for sink, folder in ((here, "a"), (there, "b")):
        version = registered_version(database, f"models:/several@{sink.alias}")
        assert version.source.is_relative_to(tmp_path / folder)
    renamed = RunLayout((tmp_path / "b" / "sums").rename(tmp_path / "b" / "renamed"))
    assert deliver_again(renamed, database).alias == there.alias


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
    with pytest.raises(ConfigError, match=r"'nowhere': expected one of \['mlflow', "):
        start_tracking(layout, recipe)


def replace_settings(**changes: Any) -> TrackingSettings:
    return TrackingSettings().model_copy(update=changes)
