"""The flow in virtual time: bounds and accounts under heavy tails, deaths and slow loads."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.algorithms.staleness import trained_mask
from areal_flow.config import build_recipe
from areal_flow.core.errors import ArealFlowError, ConfigError, TrainingError
from areal_flow.core.types import (
    SKIPPED_UPDATES,
    GroupReceipt,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
)
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState
from areal_flow.flow.schedules import run_async_schedule, run_barrier_schedule, schedule_of
from areal_flow.log.ledger_row import Provenance, TokenAccounting
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at


def make_flow(
    cluster: FakeCluster,
    log: MemoryLog,
    initial: InitialState | None = None,
    max_running: int = 64,
    **numbers: Any,
) -> Flow:
    defaults = {
        "batch_size": 8,
        "group_size": 2,
        "max_staleness": 2,
        "num_steps": 12,
    }
    flow = Flow(
        flow_recipe(**{**defaults, **numbers}),
        FlowBackends(
            rollouts=cluster,
            logs=log,
            trainer=cluster,
            weights=cluster,
            prompt_at=prompt_at,
            on_step=log.on_step,
        ),
        initial or InitialState(),
        Provenance(1, "", ""),
        max_running=max_running,
    )
    cluster.on_event = lambda: check_accounting(flow)
    return flow


def check_accounting(flow: Flow) -> None:
    assert flow.imbalance() == 0
    assert 0 <= flow.gate.running <= flow.gate.outstanding
    controller = flow.recipe.controller
    bound = (controller.max_staleness + 1) * controller.batch_size
    assert flow.gate.outstanding <= bound


def check_rows(log: MemoryLog) -> None:
    """Each row's token accounting covers exactly the log up to its watermark."""
    consumed = 0
    for row in log.rows:
        consumed += sum(
            row[f"num_{account}_tokens"] for account in ("trained", "masked", "discarded")
        )
        seen = log.committed[: row["trajectory_watermark"]]
        assert sum(t.num_tokens for t in seen) == consumed + row["num_waiting_tokens"]


def heavy_tailed(randomness: random.Random) -> float:
    return randomness.paretovariate(1.1)


async def run_to_end(flow: Flow, schedule: Any = run_async_schedule) -> None:
    try:
        await schedule(flow)
    finally:
        await flow.close()


@given(
    seed=st.integers(0, 10_000),
    max_staleness=st.integers(0, 4),
    train_s=st.floats(0.01, 5),
    load_s=st.floats(0, 10),
    death_rate=st.sampled_from([0.0, 0.1, 0.3]),
    unscored_rate=st.sampled_from([0.0, 0.1]),
)
def test_no_trained_token_is_older_than_the_bound(
    seed: int,
    max_staleness: int,
    train_s: float,
    load_s: float,
    death_rate: float,
    unscored_rate: float,
) -> None:
    log = MemoryLog()
    cluster = FakeCluster(
        random.Random(seed),
        duration_s=heavy_tailed,
        train_s=train_s,
        load_s=lambda r: r.expovariate(1 / load_s) if load_s else 0.0,
        death_rate=death_rate,
        unscored_rate=unscored_rate,
    )
    flow = make_flow(
        cluster, log, max_staleness=max_staleness, max_attempts=5, max_consecutive_failures=99
    )
    run_in_virtual_time(run_to_end(flow))
    assert [row["step"] for row in log.rows] == list(range(1, 13))
    trained: set[str] = set()
    for request, row in zip(cluster.requests, log.rows, strict=True):
        assert not trained & set(request.trajectory_ids)
        trained |= set(request.trajectory_ids)
        for identifier in request.trajectory_ids:
            spans = cluster.spans[identifier]
            versions = [v for v, length in spans for _ in range(length)]
            mask = trained_mask(
                spans,
                np.ones(len(versions), np.bool_),
                policy_version=request.policy_version,
                max_staleness=max_staleness,
            )
            ages = [request.policy_version - v for v, m in zip(versions, mask, strict=True) if m]
            assert ages, "a trajectory with nothing to train was consumed"
            assert max(ages) <= max_staleness
            assert min(ages) >= 0
        assert row["staleness_max"] <= max_staleness
    check_accounting(flow)
    check_rows(log)
    accounting = flow.accounting
    assert accounting.committed == sum(t.num_tokens for t in log.committed)
    assert accounting.committed == sum(r["num_generated_tokens"] for r in log.rows) + (
        accounting.entries.num_generated_tokens
    )


@given(seed=st.integers(0, 10_000), death_rate=st.sampled_from([0.0, 0.2]))
def test_zero_staleness_never_overlaps(seed: int, death_rate: float) -> None:
    log = MemoryLog()
    cluster = FakeCluster(
        random.Random(seed), duration_s=heavy_tailed, train_s=1.0, death_rate=death_rate
    )
    flow = make_flow(cluster, log, max_staleness=0, max_attempts=5, max_consecutive_failures=99)
    overlaps = []
    submit = flow.submit

    def watched_submit() -> None:
        overlaps.append(cluster.training)
        submit()

    flow.submit = watched_submit  # type: ignore[method-assign]
    step = cluster.step

    async def watched_step(request: Any) -> Any:
        overlaps.append(cluster.num_running > 0)
        return await step(request)

    cluster.step = watched_step  # type: ignore[method-assign]
    run_in_virtual_time(run_to_end(flow))
    assert overlaps
    assert not any(overlaps)
    assert all(row["staleness_max"] == 0 for row in log.rows)


def test_async_overlaps_and_is_quicker_than_the_barrier() -> None:
    async def timed(schedule: Any) -> tuple[float, MemoryLog]:
        log = MemoryLog()
        cluster = FakeCluster(random.Random(1), duration_s=lambda r: r.expovariate(0.5), train_s=3)
        flow = make_flow(cluster, log)
        await run_to_end(flow, schedule)
        return asyncio.get_running_loop().time(), log

    overlapped, log = run_in_virtual_time(timed(run_async_schedule))
    barrier, barrier_log = run_in_virtual_time(timed(run_barrier_schedule))
    assert overlapped < 0.75 * barrier
    assert max(row["staleness_max"] for row in log.rows) > 0
    assert all(row["staleness_max"] == 0 for row in barrier_log.rows)


def test_barrier_consumes_submissions_in_order_like_async_without_staleness() -> None:
    def consumed(schedule: Any) -> list[tuple[str, ...]]:
        cluster = FakeCluster(random.Random(3), duration_s=heavy_tailed)
        flow = make_flow(cluster, MemoryLog(), max_staleness=0, num_steps=5)
        run_in_virtual_time(run_to_end(flow, schedule))
        return [request.trajectory_ids for request in cluster.requests]

    assert consumed(run_async_schedule) == consumed(run_barrier_schedule)


@pytest.mark.parametrize(
    ("table", "schedule"),
    [
        ({}, run_async_schedule),
        ({"schedule": "sync"}, run_barrier_schedule),
        ({"controller": {"exact_staleness": 0}}, run_barrier_schedule),
    ],
)
def test_schedule_is_the_recipes_but_for_batches_of_an_exact_age(
    table: dict[str, Any], schedule: object
) -> None:
    assert schedule_of(build_recipe(table, source="test")) is schedule


@given(
    seed=st.integers(0, 10_000),
    exact=st.integers(0, 3),
    slack=st.integers(0, 2),
    death_rate=st.sampled_from([0.0, 0.2]),
    unscored_rate=st.sampled_from([0.0, 0.1]),
)
def test_each_batch_is_exactly_as_old_as_the_recipe_says(
    seed: int, exact: int, slack: int, death_rate: float, unscored_rate: float
) -> None:
    """However long episodes take, whoever dies, and whatever is not scored."""
    log = MemoryLog()
    cluster = FakeCluster(
        random.Random(seed),
        duration_s=heavy_tailed,
        death_rate=death_rate,
        unscored_rate=unscored_rate,
    )
    numbers = {"max_staleness": exact + slack, "exact_staleness": exact, "num_steps": 7}
    flow = make_flow(cluster, log, max_attempts=5, max_consecutive_failures=99, **numbers)
    run_in_virtual_time(run_to_end(flow, schedule_of(flow.recipe)))
    rows = [row for row in log.rows if row["step"] > 0]
    assert len(rows) == 7
    for row in rows:
        age = min(exact, row["step"] - 1)
        assert (row["staleness_mean"], row["staleness_max"]) == (age, age)
    check_rows(log)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"controller": {"exact_staleness": 3}}, r"exact_staleness \(3\) must not exceed"),
        (
            {"schedule": "sync", "controller": {"exact_staleness": 1}},
            "set schedule to 'async'",
        ),
        ({"controller": {"exact_staleness": -1}}, "greater than or equal to 0"),
    ],
)
def test_exact_staleness_that_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe(table, source="test")


@pytest.mark.parametrize("schedule", [run_async_schedule, run_barrier_schedule])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_group_that_fails_for_good_frees_its_slot(schedule: Any, max_staleness: int) -> None:
    cluster = FakeCluster(random.Random(5), death_rate=0.6)
    log = MemoryLog()
    flow = make_flow(
        cluster, log, max_attempts=1, max_consecutive_failures=99, max_staleness=max_staleness
    )
    run_in_virtual_time(run_to_end(flow, schedule))
    failed = [index for row in log.rows for index in row["failed_submissions"]]
    assert failed, "the fake cluster was to kill some groups"
    assert len(log.rows) == 12
    check_accounting(flow)


def waiting_group(submission_index: int, version: int) -> GroupReceipt:
    members = [
        TrajectoryReceipt(
            trajectory_id(submission_index, m), (VersionSpan(version, 4),), 1.0, "stop"
        )
        for m in range(2)
    ]
    return GroupReceipt(submission_index, (), tuple(members))


def test_group_that_a_step_made_stale_is_discarded_with_the_step() -> None:
    """Nothing else is committed meanwhile, so nothing else would trigger it."""
    fresh = [waiting_group(index, version=1) for index in range(4)]
    aging = waiting_group(9, version=0)
    cluster, log = FakeCluster(random.Random(0), initial_version=1), MemoryLog()
    cluster.spans = {t.trajectory_id: t.version_spans for g in fresh for t in g.trajectories}
    initial = InitialState(
        policy_version=1,
        next_submission_index=10,
        waiting=(*fresh, aging),
        accounting=TokenAccounting(committed=5 * 2 * 4),
    )
    flow = make_flow(cluster, log, initial, max_staleness=1)
    assert flow.gate.outstanding == 10

    async def take_a_step() -> None:
        batch = await flow.wait_for_batch()
        assert batch is not None
        assert len(batch) == 8
        assert len(flow.buffer) == 1, "at version 1 it could still be trained"
        await flow.train(batch, wait_s=0.0)
        await flow.wait_until_released()

    run_in_virtual_time(take_a_step())
    assert flow.policy_version == 2
    assert len(flow.buffer) == 0
    discarded = [(d.trajectory_id, d.reason) for d in flow.accounting.entries.discards]
    assert discarded == [(t.trajectory_id, "stale") for t in aging.trajectories]
    assert flow.gate.outstanding == 0, "its slot is free again"
    assert flow.imbalance() == 0


def test_repeated_failures_end_the_run_with_the_root_cause() -> None:
    flow = make_flow(FakeCluster(random.Random(0), death_rate=100.0), MemoryLog())
    with pytest.raises(ArealFlowError, match=r"4 groups in a row failed.*fake generator died"):
        run_in_virtual_time(run_to_end(flow))


def test_verifier_that_always_fails_ends_the_run_with_the_root_cause() -> None:
    flow = make_flow(FakeCluster(random.Random(0), unscored_rate=1.0), MemoryLog())
    with pytest.raises(ArealFlowError, match="unscored"):
        run_in_virtual_time(run_to_end(flow))


def test_stop_finishes_the_running_step_and_loses_nothing_committed() -> None:
    async def stop_soon() -> tuple[Flow, MemoryLog]:
        log = MemoryLog()
        flow = make_flow(FakeCluster(random.Random(2), train_s=5), log, num_steps=1000)
        asyncio.get_running_loop().call_later(42, flow.request_stop)
        await run_to_end(flow)
        return flow, log

    flow, log = run_in_virtual_time(stop_soon())
    assert 0 < len(log.rows) < 20
    assert flow.policy_version == log.rows[-1]["step"]
    check_accounting(flow)


def test_error_in_training_ends_the_run_as_itself() -> None:
    cluster = FakeCluster(random.Random(0))

    async def fail(request: Any) -> Any:
        raise ArealFlowError("the loss is not finite")

    cluster.step = fail  # type: ignore[method-assign]
    flow = make_flow(cluster, MemoryLog())
    with pytest.raises(ArealFlowError, match="not finite"):
        run_in_virtual_time(run_to_end(flow))


def test_run_whose_steps_go_on_changing_nothing_ends_and_says_why() -> None:
    """Until then each is a normal step: recorded, and its policy published."""
    log, cluster = MemoryLog(), FakeCluster(random.Random(0))
    compute = cluster.step

    async def skip(request: StepRequest) -> StepResult:
        result = await compute(request)
        skipped = {} if request.step in (1, 4) else {SKIPPED_UPDATES: 0.5}
        return replace(result, metrics=replace(result.metrics, metrics=skipped))

    cluster.step = skip  # type: ignore[method-assign]
    flow = make_flow(cluster, log)
    with pytest.raises(TrainingError, match="found 5 steps in a row, the last one 9"):
        run_in_virtual_time(run_to_end(flow))
    assert [row["step"] for row in log.rows] == [*range(1, 10)]


def test_generation_goes_on_while_the_trainer_is_away() -> None:
    log = MemoryLog()
    cluster = FakeCluster(random.Random(0), train_s=600.0)
    flow = make_flow(cluster, log, num_steps=1)
    committed: list[int] = []

    async def count_meanwhile() -> None:
        while not cluster.training:
            await asyncio.sleep(0.1)
        committed.append(len(log.committed))
        await asyncio.sleep(60)
        assert cluster.training
        committed.append(len(log.committed))

    async def both() -> None:
        await asyncio.gather(run_to_end(flow), count_meanwhile())

    run_in_virtual_time(both())
    assert committed[1] >= committed[0] + flow.recipe.controller.batch_size


def test_number_of_generators_sets_how_much_runs_at_once() -> None:
    log = MemoryLog()
    cluster = FakeCluster(random.Random(0), train_s=0.01, duration_s=lambda r: 1.0)
    flow = make_flow(cluster, log, max_running=2, num_steps=10_000)
    running: list[int] = []

    async def change_meanwhile() -> None:
        for max_running in (2, 8, 2):
            flow.set_max_running(max_running)
            await asyncio.sleep(20)
            running.append(cluster.num_running * flow.recipe.controller.group_size)
        flow.request_stop()

    async def both() -> None:
        await asyncio.gather(run_to_end(flow), change_meanwhile())

    run_in_virtual_time(both())
    assert running == [2, 8, 2]
