"""The stages of a flow, one at a time, each with backends that do what a test tells them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from areal_flow.controller.accounting import TokenAccounting
from areal_flow.controller.flow import RETRY_DELAY_S, Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.records import Provenance, batch_digest, group_seeds
from areal_flow.controller.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.errors import ArealFlowError, EngineError
from areal_flow.types import (
    Discard,
    EngineStats,
    Episode,
    GroupReceipt,
    StepRequest,
    TrajectoryReceipt,
    VersionSpan,
    submission_index_of,
    trajectory_id,
)
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at
from tests.unit.virtual_time import run_in_virtual_time


def group(index: int, *, version: int = 0, scored: bool = True, **receipt: Any) -> GroupReceipt:
    """Return a written group of two members with four tokens each."""
    members = tuple(
        TrajectoryReceipt(
            trajectory_id(index, member),
            (VersionSpan(version, 4),),
            float(member) if scored else None,
            "stop",
        )
        for member in (0, 1)
    )
    return GroupReceipt(index, (f"fragment-{index}",), members, **receipt)


@dataclass
class Rollouts:
    """Answers episodes with what `outcomes` holds, in order; without one, at once and well."""

    outcomes: list[GroupReceipt | BaseException] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    started_at: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    async def run(self, episode: Episode) -> GroupReceipt:
        self.episodes.append(episode)
        self.started_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.duration_s)
        outcome = self.outcomes.pop(0) if self.outcomes else group(episode.submission_index)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@dataclass
class Parts:
    """A flow of two trajectories a step, and the backends that it was made with."""

    rollouts: Rollouts = field(default_factory=Rollouts)
    log: MemoryLog = field(default_factory=MemoryLog)
    cluster: FakeCluster = field(default_factory=lambda: FakeCluster(random.Random(0)))

    def flow(
        self, initial: InitialState | None = None, *, max_running: int = 64, **numbers: Any
    ) -> Flow:
        defaults = {
            "batch_size": 2,
            "group_size": 2,
            "max_staleness": 0,
            "num_steps": 9,
            "seed": 5,
        }
        initial = initial or InitialState()
        for receipt in initial.waiting:
            self.cluster.spans |= {t.trajectory_id: t.version_spans for t in receipt.trajectories}
        return Flow(
            flow_recipe(**{**defaults, **numbers}),
            FlowBackends(
                rollouts=self.rollouts,
                logs=self.log,
                trainer=self.cluster,
                weights=self.cluster,
                prompt_at=prompt_at,
                on_step=self.log.on_step,
            ),
            initial,
            Provenance(6, "config", "code"),
            max_running=max_running,
        )


def waiting(*indices: int, **initial: Any) -> InitialState:
    """Return the state of a run that was resumed with these groups in the log."""
    return InitialState(
        waiting=tuple(group(index) for index in indices),
        accounting=TokenAccounting(committed=8 * len(indices)),
        next_submission_index=max(indices) + 1,
        **initial,
    )


async def train_once(flow: Flow) -> None:
    batch = await flow.wait_for_batch()
    assert batch is not None
    await flow.train(batch, seconds_wait=1.25)


async def roll_out(flow: Flow, num_groups: int = 1) -> None:
    """Submit so many groups, one after another, and commit what they give."""
    for _ in range(num_groups):
        flow.submit()
        await asyncio.sleep(60)
        await flow.commit_written()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return run_in_virtual_time(coroutine)


# Training


def test_groups_that_a_step_made_too_old_are_discarded_with_it() -> None:
    parts = Parts()

    async def scenario() -> None:
        flow = parts.flow(waiting(0, 1, 2))
        assert flow.gate.outstanding == 6
        await train_once(flow)
        assert (len(flow.buffer), flow.num_ready) == (0, 0)
        assert flow.gate.outstanding == 2, "the batch's own slots wait for the new weights"
        assert {d.trajectory_id for d in flow.accounting.entries.discards} == {
            trajectory_id(index, member) for index in (1, 2) for member in (0, 1)
        }
        assert (flow.accounting.discarded, flow.imbalance()) == (16, 0)
        await flow.wait_until_released()
        assert flow.gate.outstanding == 0

    run(scenario())


def test_group_that_a_step_left_fresh_enough_stays() -> None:
    async def scenario() -> None:
        flow = Parts().flow(waiting(0, 1), max_staleness=1)
        await train_once(flow)
        assert len(flow.buffer) == 1
        await flow.wait_until_released()
        assert (flow.gate.outstanding, flow.imbalance()) == (2, 0)

    run(scenario())


def test_steps_follow_each_other_by_hash_and_number() -> None:
    parts = Parts()

    async def scenario() -> None:
        flow = parts.flow(waiting(4, 5, weights_hash="w0"), max_staleness=4)
        await train_once(flow)
        await train_once(flow)
        await flow.wait_until_released()

    run(scenario())
    first, second = parts.log.rows
    ids = (trajectory_id(4, 0), trajectory_id(4, 1))
    assert parts.cluster.requests[0] == StepRequest(1, "w0", 0, ids, batch_digest(0, ids), 4)
    assert (second["step"], second["policy_version"]) == (2, 1)
    assert second["parent_hash"] == first["weights_hash"]
    assert (first["num_waiting_tokens"], second["num_waiting_tokens"]) == (8, 0)
    assert (first["num_trained_tokens"], first["seconds_wait"]) == (8, 1.25)
    assert (first["writer_epoch"], first["next_submission_index"]) == (6, 6)
    assert 0 <= second["seconds_step"] < 60


def test_row_is_committed_before_its_weights_are_published_and_shown_after() -> None:
    parts = Parts()
    events: list[Any] = []

    async def append(row: dict[str, Any]) -> None:
        events.append(("row", row["step"]))

    async def publish(version: int) -> None:
        events.append(("weights", version))

    async def on_step(row: dict[str, Any]) -> None:
        events.append(("shown", row["step"]))

    parts.log.append = append  # type: ignore[method-assign]
    parts.log.on_step = on_step  # type: ignore[method-assign]
    parts.cluster.publish = publish  # type: ignore[method-assign]

    async def scenario() -> None:
        flow = parts.flow(waiting(0))
        await train_once(flow)
        await flow.wait_until_released()

    run(scenario())
    assert events == [("row", 1), ("weights", 1), ("shown", 1)]


def test_last_step_and_a_stop_end_training() -> None:
    async def batch_of(flow: Flow) -> Any:
        return await flow.wait_for_batch()

    assert run(batch_of(Parts().flow(waiting(0), num_steps=0))) is None
    assert run(batch_of(Parts().flow(waiting(0, policy_version=3), num_steps=3))) is None
    assert (
        run(batch_of(Parts().flow(waiting(0, policy_version=2), num_steps=3, max_staleness=2)))
        is not None
    )
    stopped = Parts().flow(waiting(0))
    stopped.request_stop()
    assert stopped.done()
    assert run(batch_of(stopped)) is None


def test_weights_that_cannot_be_announced_end_the_run() -> None:
    parts = Parts()

    async def fail(version: int) -> None:
        raise OSError(f"no weights {version}")

    parts.cluster.load_everywhere = fail  # type: ignore[method-assign]

    async def scenario() -> None:
        flow = parts.flow(waiting(0))
        await train_once(flow)
        await flow.wait_for_change(flow.num_changes)

    with pytest.raises(ArealFlowError, match=r"could not be announced: OSError\('no weights 1'\)"):
        run(scenario())


# Where a run begins


def test_what_recovery_discards_is_in_the_next_row() -> None:
    parts = Parts()
    lost = Discard(trajectory_id(7, 0), 8, "beyond_head")

    async def scenario() -> None:
        flow = parts.flow(waiting(0, discards=(lost,)))
        flow.accounting.committed += 8
        assert (flow.imbalance(), flow.accounting.discarded) == (0, 8)
        await train_once(flow)
        await flow.wait_until_released()

    run(scenario())
    (row,) = parts.log.rows
    assert row["discarded"] == [{"trajectory_id": lost.trajectory_id, "reason": "beyond_head"}]
    assert row["num_discarded_tokens"] == 8


def test_restored_groups_are_ready_and_not_pending() -> None:
    flow = Parts().flow(waiting(0, 1))
    assert (flow.num_ready, flow.num_pending_groups) == (4, 0)
    assert (flow.gate.running, flow.gate.outstanding) == (0, 4)


def test_restored_group_that_is_too_old_frees_its_slot() -> None:
    flow = Parts().flow(waiting(0, 1, policy_version=1))
    assert (flow.num_ready, flow.gate.outstanding, flow.accounting.discarded) == (0, 0, 16)


def test_unaccounted_submissions_go_first_and_the_cursor_follows() -> None:
    parts = Parts()

    async def scenario() -> int:
        flow = parts.flow(InitialState(next_submission_index=5, resubmit=(1, 3)))
        await roll_out(flow, 4)
        return flow.log_position().next_submission_index

    assert run(scenario()) == 7
    assert [episode.submission_index for episode in parts.rollouts.episodes] == [1, 3, 5, 6]


# Episodes


def test_attempts_are_the_same_episode_later_each_time() -> None:
    parts = Parts(Rollouts([EngineError("died"), EngineError("died")]))

    async def scenario() -> Flow:
        flow = parts.flow(InitialState(next_submission_index=12), max_attempts=3)
        flow.submit()
        assert (flow.num_pending_groups, flow.gate.outstanding) == (1, 2)
        await asyncio.sleep(60)
        assert (flow.num_pending_groups, flow.num_ready) == (1, 0)
        await flow.commit_written()
        assert (flow.num_pending_groups, flow.num_ready) == (0, 2)
        return flow

    flow = run(scenario())
    assert [episode.attempt for episode in parts.rollouts.episodes] == [0, 1, 2]
    assert parts.rollouts.started_at == [0.0, RETRY_DELAY_S, 3 * RETRY_DELAY_S]
    assert {episode.seeds for episode in parts.rollouts.episodes} == {group_seeds(5, 12, 2)}
    assert {episode.writer_epoch for episode in parts.rollouts.episodes} == {6}
    assert len({episode.submitted_at for episode in parts.rollouts.episodes}) == 1
    assert flow.accounting.entries.failed_submissions == []


def test_group_is_given_up_after_its_last_attempt() -> None:
    parts = Parts(Rollouts([EngineError("died"), EngineError("died")]))

    async def scenario() -> Flow:
        flow = parts.flow(max_attempts=2)
        flow.submit()
        await asyncio.sleep(60)
        return flow

    flow = run(scenario())
    assert len(parts.rollouts.episodes) == 2
    assert flow.accounting.entries.failed_submissions == [0]
    assert (flow.gate.running, flow.gate.outstanding) == (0, 0)


def fails(*outcomes: str) -> None:
    """Run groups of these outcomes, then wait for a change: raises what ended the run."""
    told: dict[str, GroupReceipt | BaseException] = {
        "dead": EngineError("died"),
        "unscored": group(0, scored=False, member_errors=("first", "verifier raised")),
        "empty": GroupReceipt(0, (), ()),
    }
    script = [
        group(i) if outcome == "good" else told[outcome] for i, outcome in enumerate(outcomes)
    ]
    parts = Parts(Rollouts(script))

    async def scenario() -> None:
        flow = parts.flow(max_attempts=1, max_consecutive_failures=2, max_staleness=9)
        await roll_out(flow, len(outcomes))
        flow.notify()
        await flow.wait_for_change(flow.num_changes - 1)

    run(scenario())


def test_failures_count_in_a_row_only() -> None:
    fails("dead", "good", "dead", "good", "unscored", "good", "dead")
    with pytest.raises(EngineError, match="2 groups in a row failed; the last one: died"):
        fails("good", "dead", "dead")
    with pytest.raises(ArealFlowError, match=r"2 groups in a row failed.*: verifier raised"):
        fails("dead", "unscored")
    with pytest.raises(ArealFlowError, match=r"2 groups in a row failed.*: no member was scored"):
        fails("dead", "empty")


def test_error_that_nobody_expected_ends_the_run() -> None:
    parts = Parts(Rollouts([KeyError("prompt")]))

    async def scenario() -> None:
        flow = parts.flow()
        flow.submit()
        await flow.wait_for_change(flow.num_changes)

    with pytest.raises(ArealFlowError, match=r"an episode ended unexpectedly: KeyError\('prompt'"):
        run(scenario())


# Commit


def test_group_without_a_score_is_discarded_and_its_slot_is_free() -> None:
    parts = Parts(Rollouts([group(0, scored=False, member_errors=("a", "b"))]))

    async def scenario() -> Flow:
        flow = parts.flow()
        await roll_out(flow)
        return flow

    flow = run(scenario())
    assert (flow.gate.running, flow.gate.outstanding, len(flow.buffer)) == (0, 0, 0)
    assert flow.accounting.entries.num_member_errors == 2
    assert (flow.accounting.committed, flow.accounting.discarded, flow.imbalance()) == (8, 8, 0)


def test_engine_time_is_counted_once_for_each_engine() -> None:
    busy = [("a", 3.0), ("a", 2.0), ("b", 0.5), ("a", 3.25), ("b", 0.5)]
    stats = [EngineStats(name, busy_s=seconds) for name, seconds in busy]
    parts = Parts(Rollouts([group(i, engine_stats=of) for i, of in enumerate(stats)]))

    async def scenario() -> Flow:
        flow = parts.flow(
            InitialState(engine_totals=(EngineStats("a", busy_s=1.0),)), max_staleness=9
        )
        await roll_out(flow, len(busy))
        return flow

    assert run(scenario()).accounting.entries.seconds_generate == 2.0 + 0.5 + 0.25


def test_groups_that_are_written_during_a_commit_are_in_the_next() -> None:
    parts = Parts(log=MemoryLog(acknowledge_s=10.0))

    async def scenario() -> None:
        flow = parts.flow(max_staleness=9)
        flow.submit()
        await asyncio.sleep(1)
        first = asyncio.create_task(flow.commit_written())
        await asyncio.sleep(1)
        flow.submit()
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(1)
        assert flow.log_head.trajectory_watermark == 0, "nothing is claimed before it is known"
        await flow.commit_written()
        assert (flow.log_head.trajectory_watermark, flow.log_head.lance_version) == (2, 1)
        assert len(flow.buffer) == 1
        await flow.commit_written()
        assert (flow.log_head.trajectory_watermark, flow.log_head.lance_version) == (4, 2)
        assert len(flow.buffer) == 2
        await flow.commit_written()
        assert flow.log_head.lance_version == 2, "there was nothing to commit"

    run(scenario())


def test_close_commits_what_is_written_and_drops_what_is_not() -> None:
    parts = Parts(log=MemoryLog(acknowledge_s=10.0))

    async def scenario() -> Flow:
        flow = parts.flow(max_staleness=9)
        flow.submit()
        await asyncio.sleep(1)
        committing = asyncio.create_task(flow.commit_written())
        flow.submit()
        await asyncio.sleep(1)
        parts.rollouts.duration_s = 1000.0
        flow.submit()
        await asyncio.sleep(1)
        committing.cancel()
        await flow.close()
        return flow

    flow = run(scenario())
    assert {submission_index_of(t.trajectory_id) for t in parts.log.committed} == {0, 1}
    assert (len(flow.buffer), flow.accounting.committed, flow.imbalance()) == (2, 16, 0)


# Schedules


def test_barrier_submits_when_every_generator_serves_the_newest_weights() -> None:
    cluster = FakeCluster(random.Random(0), duration_s=lambda r: 1.0, load_s=lambda r: 5.0)
    log = MemoryLog()
    flow = Flow(
        flow_recipe(num_steps=4, batch_size=4, group_size=2, max_staleness=3),
        FlowBackends(cluster, log, cluster, cluster, prompt_at, log.on_step),
        InitialState(),
        Provenance(1, "", ""),
        max_running=64,
    )
    served: list[tuple[int, set[int], bool]] = []
    submit = flow.submit

    def watched_submit() -> None:
        served.append((flow.policy_version, set(cluster.served), cluster.training))
        submit()

    flow.submit = watched_submit  # type: ignore[method-assign]

    async def scenario() -> float:
        await run_barrier_schedule(flow)
        await flow.close()
        return asyncio.get_running_loop().time()

    lasted_s = run(scenario())
    assert served == [(version, {version}, False) for version in range(4) for _ in range(2)]
    assert lasted_s == pytest.approx(4 * (1.0 + 1.0 + 5.0), abs=0.2)


def test_schedule_leaves_no_stage_behind() -> None:
    async def scenario(schedule: Any) -> set[Any]:
        await schedule(Parts().flow(num_steps=0, max_running=0))
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert run(scenario(run_async_schedule)) == set()
    assert run(scenario(run_barrier_schedule)) == set()


def test_every_waiter_hears_of_a_change_that_it_has_not_seen() -> None:
    async def scenario() -> list[str]:
        flow, heard = Parts().flow(), []

        async def listen(name: str, seen: int) -> None:
            await flow.wait_for_change(seen)
            heard.append(f"{name} at {flow.num_changes}")

        assert flow.num_changes == 0
        flow.notify()
        waiters = [asyncio.create_task(listen(f"seen {seen}", seen)) for seen in (0, 1, 1, 2)]
        for _ in range(3):
            await asyncio.sleep(1)
            flow.notify()
        await asyncio.gather(*waiters)
        return heard

    assert run(scenario()) == ["seen 0 at 1", "seen 1 at 2", "seen 1 at 2", "seen 2 at 3"]
