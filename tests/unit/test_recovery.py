"""The recovery plan: nothing committed is lost or trained twice, nothing submitted is skipped."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_flow.core.types import (
    Discard,
    Episode,
    GroupReceipt,
    PolicyHashes,
    TrajectoryReceipt,
    VersionSpan,
    submission_index_of,
    trajectory_id,
)
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState, RetryBudget
from areal_flow.flow.recovery.plan import plan_initial_state
from areal_flow.flow.recovery.restore import LedgerReplay
from areal_flow.flow.schedules import run_async_schedule
from areal_flow.log.ledger_row import (
    CommittedGroups,
    Provenance,
    StepEntries,
    TokenAccounting,
    genesis_row,
)
from areal_flow.log.settled import SettledPast
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at

PROVENANCE = Provenance(1, "", "")
NOTHING_SETTLED = SettledPast()
GENESIS = genesis_row(PolicyHashes("w0", ""), provenance=PROVENANCE, numeric_environment="{}")


def make_flow(
    cluster: FakeCluster,
    log: MemoryLog,
    initial: InitialState,
    num_steps: int,
) -> Flow:
    recipe = flow_recipe(
        num_steps=num_steps,
        batch_size=8,
        group_size=2,
        max_staleness=2,
        max_attempts=3,
        max_consecutive_failures=99,
    )
    backends = FlowBackends(cluster, log, cluster, cluster, prompt_at, log.on_step)
    return Flow(recipe, backends, initial, PROVENANCE, max_running=40)


def plan(log: MemoryLog, rows: list[dict[str, Any]] | None = None) -> InitialState:
    """Plan from both complete logs, as brute force."""
    rows = log.rows if rows is None else rows
    consumed = {identifier for row in rows for identifier in row["trajectory_ids"]}
    consumed |= {discard["trajectory_id"] for row in rows for discard in row["discarded"]}
    committed = CommittedGroups(
        {submission_index_of(t.trajectory_id) for t in log.committed},
        sum(t.num_tokens for t in log.committed),
    )
    unconsumed = [t for t in log.committed if t.trajectory_id not in consumed]
    return plan_initial_state(NOTHING_SETTLED, rows, unconsumed, committed, len(log.committed))


async def run_to_end(flow: Flow) -> None:
    await run_async_schedule(flow)
    await flow.close()


async def run_until_killed(flow: Flow, after_s: float) -> None:
    """Run; at `after_s` drop everything at once, as a kill would."""
    running = asyncio.create_task(run_async_schedule(flow))
    await asyncio.wait([running], timeout=after_s)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@given(
    seed=st.integers(0, 1000),
    kills=st.lists(st.floats(0.5, 15), min_size=1, max_size=4),
    death_rate=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_killed_and_resumed_runs_lose_and_repeat_nothing(
    seed: int, kills: list[float], death_rate: float
) -> None:
    log = MemoryLog(rows=[GENESIS])
    spans: dict[str, Any] = {}
    for life, after_s in enumerate([*kills, 10_000.0]):
        start = plan(log)
        cluster = FakeCluster(
            random.Random(seed + life),
            duration_s=lambda r: r.paretovariate(1.2),
            death_rate=death_rate,
            spans=spans,
            initial_version=start.policy_version,
        )
        flow = make_flow(cluster, log, start, num_steps=15)
        assert flow.imbalance() == 0
        run_in_virtual_time(run_until_killed(flow, after_s))
    assert [row["step"] for row in log.rows] == list(range(16))
    trained = [identifier for row in log.rows for identifier in row["trajectory_ids"]]
    assert len(trained) == len(set(trained))
    committed = [trajectory.trajectory_id for trajectory in log.committed]
    assert len(committed) == len(set(committed))
    assert set(trained) <= set(committed)
    assert all(row["staleness_max"] <= 2 for row in log.rows)
    end = plan(log)
    accounted = {submission_index_of(identifier) for identifier in committed}
    failed = [index for row in log.rows for index in row["failed_submissions"]]
    assert len(failed) == len(set(failed)), "each is given up once"
    assert accounted.isdisjoint(failed)
    assert accounted | {*failed, *end.resubmit} == set(range(end.next_submission_index))
    accounting = end.accounting
    waiting = sum(t.num_tokens for group in end.waiting for t in group.trajectories)
    lost = sum(discard.num_tokens for discard in end.discards)
    assert accounting.imbalance(num_waiting=waiting + lost) == 0


class SlowAlways(FakeCluster):
    """A retried episode takes as long as before, since its prompt makes it long."""

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> GroupReceipt:
        self.duration_s = lambda _: duration_of(episode.submission_index)
        return await super().roll_out(episode, budget)


def duration_of(submission_index: int) -> float:
    return random.Random(submission_index).paretovariate(1.2)


@pytest.mark.slow
@given(seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_long_episodes_are_not_lost_more_often_than_short_ones(seed: int) -> None:
    randomness = random.Random(seed)
    log = MemoryLog(rows=[GENESIS])
    spans: dict[str, Any] = {}
    num_interrupted = 0
    for after_s in [*(randomness.uniform(1, 6) for _ in range(8)), 10_000.0]:
        start = plan(log)
        num_interrupted = start.next_submission_index
        cluster = SlowAlways(randomness, spans=spans, initial_version=start.policy_version)
        flow = make_flow(cluster, log, start, num_steps=60)
        run_in_virtual_time(run_until_killed(flow, after_s))
    committed = {submission_index_of(t.trajectory_id) for t in log.committed}
    out = [index for index in range(num_interrupted) if index not in committed]
    assert set(out) <= set(plan(log).resubmit), "the next life will submit them again"
    assert sum(duration_of(index) > 20 for index in range(num_interrupted)) >= len(out)
    assert all(duration_of(index) > 20 for index in out), (
        "only what the last life was too short for"
    )


def test_replayed_request_is_the_one_that_was_made() -> None:
    log = MemoryLog(rows=[GENESIS])
    cluster = FakeCluster(random.Random(0))
    start = plan(log)
    run_in_virtual_time(run_to_end(make_flow(cluster, log, start, num_steps=3)))
    replayed = [
        LedgerReplay(cluster, log.rows[step:], PolicyHashes(row["parent_hash"], ""), 2).next_request
        for step, row in enumerate(log.rows[1:])
    ]
    assert replayed == cluster.requests


def receipt(index: int, member: int, *, version: int = 0, num_tokens: int = 4) -> TrajectoryReceipt:
    spans = (VersionSpan(version, num_tokens),)
    return TrajectoryReceipt(trajectory_id(index, member), spans, 1.0, "stop")


def ledger_row(step: int, **columns: Any) -> dict[str, Any]:
    return {**GENESIS, "step": step, "weights_hash": f"w{step}", **columns}


LEDGER = [
    ledger_row(0),
    ledger_row(
        1,
        failed_submissions=[4, 1],
        num_generated_tokens=100,
        num_trained_tokens=60,
        num_masked_tokens=7,
        num_discarded_tokens=3,
        next_submission_index=4,
    ),
    ledger_row(
        2,
        failed_submissions=[6],
        num_generated_tokens=50,
        num_trained_tokens=40,
        num_masked_tokens=1,
        num_discarded_tokens=2,
        next_submission_index=9,
    ),
]


def test_given_up_and_committed_submissions_are_not_submitted_again() -> None:
    planned = plan_initial_state(NOTHING_SETTLED, LEDGER, [], CommittedGroups({0, 2, 3, 7}), 8)
    assert planned.resubmit == (5, 8)
    assert planned.next_submission_index == 9
    assert (planned.policy_version, planned.weights_hash) == (2, "w2")
    assert planned.watermark == 8


def test_cursor_is_beyond_whatever_was_committed() -> None:
    planned = plan_initial_state(NOTHING_SETTLED, LEDGER, [], CommittedGroups({0, 2, 9, 11}), 0)
    assert planned.next_submission_index == 12
    assert planned.resubmit == (3, 5, 7, 8, 10)
    fresh = plan_initial_state(NOTHING_SETTLED, LEDGER[:1], [], CommittedGroups(), 0)
    assert (fresh.next_submission_index, fresh.resubmit) == (0, ())


def test_waiting_groups_are_whole_and_in_order_and_newer_ones_are_discarded() -> None:
    left = [
        receipt(7, 0, version=2),
        receipt(3, 0, version=1),
        receipt(8, 0, version=3, num_tokens=5),
        receipt(7, 1, version=2),
    ]
    planned = plan_initial_state(NOTHING_SETTLED, LEDGER, left, CommittedGroups({3, 7, 8}), 0)
    assert [(g.submission_index, g.trajectories) for g in planned.waiting] == [
        (3, (left[1],)),
        (7, (left[0], left[3])),
    ]
    assert planned.discards == (Discard(trajectory_id(8, 0), 5, "beyond_head"),)


def test_trajectories_scored_by_another_verifier_are_not_trained() -> None:
    left = [receipt(3, 0, version=1), receipt(7, 0, version=2, num_tokens=5)]
    other = frozenset({trajectory_id(7, 0)})
    planned = plan_initial_state(
        NOTHING_SETTLED, LEDGER, left, CommittedGroups({3, 7}, 0, other), 0
    )
    assert [group.submission_index for group in planned.waiting] == [3]
    assert planned.discards == (Discard(trajectory_id(7, 0), 5, "other_verifier"),)


def test_totals_continue_from_the_sums_of_the_ledger() -> None:
    planned = plan_initial_state(
        NOTHING_SETTLED, LEDGER, [], CommittedGroups({0}, num_tokens=170), 0
    )
    assert planned.accounting == TokenAccounting(
        committed=170,
        trained=100,
        masked=8,
        discarded=5,
        entries=StepEntries(num_generated_tokens=20),
    )
