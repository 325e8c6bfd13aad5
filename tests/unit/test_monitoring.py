"""Metrics for Prometheus: totals of the ledger, stages of the flow, workers by state."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from prometheus_client import CollectorRegistry, generate_latest

from areal_flow.cluster.monitoring import RunMetrics
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.registry import NUM_EARLY_DEATHS, WorkerRegistry
from areal_flow.cluster.worker import ENGINE_METRIC, SERVED_METRIC
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import PolicyHashes
from areal_flow.log.dataset import create_dataset
from areal_flow.log.ledger import STEPS
from areal_flow.log.ledger_row import genesis_row
from tests.flow_parts import Parts, run, waiting

AT = datetime(2026, 1, 2, tzinfo=UTC)
ENGINE = {"busy_seconds_total": 2.5, "batch_size": 7, "cache_fraction": 0.25}


def row(step: int, seconds: float, **by_staleness: float) -> dict[str, Any]:
    hashes = PolicyHashes("w", "s")
    first = genesis_row(hashes, provenance=Parts().flow().provenance, numeric_environment="")
    trained = {f"staleness/trained_tokens_{age[1:]}": n for age, n in by_staleness.items()}
    metrics = {"rollout/pass_rate": 0.5, **trained}
    times = dict.fromkeys((name for name in first if name.endswith("_s")), seconds)
    return {**first, **times, "step": step, "metrics": metrics, "committed_at": AT}


def fake_pool() -> Any:
    """Return a generator that serves, a reward worker that is quarantined, and finished tasks."""
    registry = WorkerRegistry()
    registry.place(WorkerPlacement("generator-0", "generator", 4))
    registry.joined("generator-0", "tls://1", process="p", now=0.0)
    quarantined = registry.place(WorkerPlacement("reward-0", "reward", 1))
    for _ in range(NUM_EARLY_DEATHS):
        quarantined.died("exit status 1", now=1.0)
    served = {"policy_version": 3, "served_hash": "h", "transfer_s": 0.1, "stall_s": 0.2}
    metrics = {"task_counts": {}, SERVED_METRIC: served, ENGINE_METRIC: ENGINE}
    worker = SimpleNamespace(name="generator-0", metrics=metrics, pid=1, processing={})
    scoring = SimpleNamespace(
        name="reward/score", state_counts={"memory": 4}, all_durations={"compute": 1.5}
    )
    other = SimpleNamespace(name="trainer/step", state_counts={}, all_durations={})
    scheduler = SimpleNamespace(
        workers={"tls://1": worker},
        task_prefixes={"reward/score": scoring, "trainer/step": other},
        monitor=SimpleNamespace(recent=dict),
    )
    return SimpleNamespace(registry=registry, scheduler=scheduler)


def shown(metrics: RunMetrics) -> dict[str, float]:
    """Return a scrape: values by series, without the run's label."""
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    samples = {name: float(value) for name, _, value in pairs}
    assert all('run="r"' in name for name in samples)
    return {
        name.replace('run="r",', "").replace(',run="r"', "").replace('{run="r"}', ""): value
        for name, value in samples.items()
    }


def metrics_of(tmp_path: Path, *rows: dict[str, Any]) -> RunMetrics:
    layout = RunLayout(tmp_path / "r")
    layout.root.mkdir()
    create_dataset(layout.steps, STEPS, [pa.Table.from_pylist([*rows], schema=STEPS)])
    return RunMetrics(layout, fake_pool())


def test_workers_are_shown_before_there_is_a_flow(tmp_path: Path) -> None:
    samples = shown(metrics_of(tmp_path))
    assert samples["areal_flow_disk_size_bytes"] > samples["areal_flow_disk_free_bytes"] > 0
    del samples["areal_flow_disk_size_bytes"], samples["areal_flow_disk_free_bytes"]
    assert samples == {
        'areal_flow_workers{role="generator",state="live"}': 1,
        'areal_flow_workers{role="generator",state="quarantined"}': 0,
        'areal_flow_workers{role="reward",state="live"}': 0,
        'areal_flow_workers{role="reward",state="quarantined"}': 1,
        'areal_flow_worker_deaths_total{role="generator"}': 0,
        'areal_flow_worker_deaths_total{role="reward"}': 3,
        'areal_flow_engine_busy_seconds_total{worker="generator-0"}': 2.5,
        'areal_flow_engine_batch_size{worker="generator-0"}': 7,
        'areal_flow_engine_cache_fraction{worker="generator-0"}': 0.25,
        'areal_flow_reward_tasks_total{task="score"}': 4,
        'areal_flow_reward_task_seconds_total{task="score"}': 1.5,
    }


def test_resumed_run_goes_on_with_the_totals_of_its_ledger(tmp_path: Path) -> None:
    rows = row(0, 600.0), row(1, 2.0, _0=5, _2=1), row(2, 4.0, _1=10)
    metrics = metrics_of(tmp_path, *rows)

    async def scenario() -> None:
        flow = Parts().flow(waiting(0, 1, 2, policy_version=2), max_staleness=9)
        await metrics.follow(flow)
        metrics.ledger.add(row(3, 1.0, _0=3))

    run(scenario())
    samples = shown(metrics)
    assert samples["areal_flow_steps_total"] == 3
    assert samples["areal_flow_last_step_timestamp_seconds"] == AT.timestamp()
    assert samples['areal_flow_step_seconds_total{part="train"}'] == 7, "not of fine-tuning before"
    below = {le: samples[f'areal_flow_staleness_versions_bucket{{le="{le}"}}'] for le in "012"}
    assert below == {"0": 8, "1": 18, "2": 19}
    assert samples['areal_flow_staleness_versions_bucket{le="+Inf"}'] == 19
    assert samples["areal_flow_staleness_versions_sum"] == 12
    assert samples['areal_flow_step_metric{name="rollout/pass_rate"}'] == 0.5
    assert samples['areal_flow_step_metric{name="train/step_s"}'] == 1, "of the newest step alone"


def test_each_admitted_trajectory_is_in_one_stage(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path, row(0, 0.0))
    parts = Parts()
    parts.rollouts.duration_s, parts.rollouts.write_s = 100.0, 50.0

    samples: list[dict[str, float]] = []

    async def scenario() -> None:
        flow = parts.flow(waiting(0, 1, 2), max_staleness=9)
        await metrics.follow(flow)
        flow.submit()
        await asyncio.sleep(120)  # this group is being scored now
        flow.submit()
        flow.submit()
        await asyncio.sleep(1)
        samples.append(shown(metrics))
        assert await flow.wait_for_batch()
        samples.append(shown(metrics))
        await flow.close()

    run(scenario())
    stages = ("generating", "scoring", "ready", "training")
    numbers = [
        [sample[f'areal_flow_trajectories{{stage="{s}"}}'] for s in stages] for sample in samples
    ]
    assert numbers == [[4, 2, 6, 0], [4, 2, 4, 2]]
    assert samples[0]["areal_flow_trajectories_limit"] == 20
    assert [sample["areal_flow_waiting_tokens"] for sample in samples] == [24, 16]
    assert not [name for name in samples[0] if "step_metric" in name], "the genesis trained nothing"
