"""Groups on their way into the log: attempts, failures, commits, and the end of a run."""

from __future__ import annotations

import asyncio

import pytest

from areal_flow.core.errors import (
    ArealFlowError,
    EngineError,
    RewardError,
    SchemaError,
    StorageError,
    WorkersLost,
)
from areal_flow.core.types import (
    EngineStats,
    GroupReceipt,
    submission_index_of,
)
from areal_flow.flow.flow import RETRY_DELAY_S, Flow
from areal_flow.flow.flow_setup import MAX_COLLATERAL_FAILURES, InitialState
from areal_flow.log.ledger_row import group_seeds
from tests.flow_fakes import MemoryLog, prompt_at
from tests.flow_parts import Parts, Rollouts, group, roll_out, run, train_once

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
    assert [each.is_last_attempt for each in parts.rollouts.episodes] == [False, False, True]
    assert parts.rollouts.started_at == [0.0, RETRY_DELAY_S, 3 * RETRY_DELAY_S]
    assert {episode.seeds for episode in parts.rollouts.episodes} == {group_seeds(5, 12, 2)}
    (prompt,) = {episode.prompt.prompt_id for episode in parts.rollouts.episodes}
    assert prompt == prompt_at(12).prompt_id
    assert {episode.writer_epoch for episode in parts.rollouts.episodes} == {6}
    assert len({episode.submitted_at for episode in parts.rollouts.episodes}) == 1
    assert flow.accounting.entries.failed_submissions == []


def test_group_is_given_up_after_its_last_attempt_and_its_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    assert caplog.messages == [
        "group 00000000, attempt 0: died",
        "group 00000000, attempt 1: died (no attempt is left: controller.max_attempts = 2)",
    ]


@pytest.mark.parametrize(
    ("failures", "num_rollouts", "is_given_up"),
    [
        ([StorageError("full"), RewardError("no judge")], 1, False),
        ([StorageError("full")] * 3, 1, True),
        ([SchemaError("no such column")], 1, True),
        ([EngineError("the generator died with the rows")], 2, False),
    ],
)
def test_group_that_cannot_be_written_is_written_again_and_generated_again_only_if_it_is_lost(
    failures: list[BaseException], num_rollouts: int, is_given_up: bool
) -> None:
    parts = Parts(Rollouts(write_failures=[*failures]))

    async def scenario() -> Flow:
        flow = parts.flow(max_attempts=3)
        await roll_out(flow)
        return flow

    flow = run(scenario())
    assert [episode.attempt for episode in parts.rollouts.episodes] == [*range(num_rollouts)]
    assert flow.accounting.entries.failed_submissions == [0] * is_given_up
    assert len(flow.buffer) == (not is_given_up)
    assert (flow.gate.running, flow.num_pending_groups) == (0, 0)
    assert parts.rollouts.write_failures == []


def test_deaths_of_generators_leave_a_group_its_attempts_until_their_own_allowance_is_exhausted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    died = WorkersLost("each worker that ran rollout died")
    parts = Parts(Rollouts([*[died] * MAX_COLLATERAL_FAILURES, EngineError("broken")]))

    async def scenario() -> Flow:
        flow = parts.flow(max_attempts=2, max_staleness=9)
        await roll_out(flow)
        parts.rollouts.outcomes = [died] * (MAX_COLLATERAL_FAILURES + 1)
        await roll_out(flow)
        return flow

    flow = run(scenario())
    attempts = [e.attempt for e in parts.rollouts.episodes if e.submission_index == 0]
    assert attempts == [0] * (MAX_COLLATERAL_FAILURES + 1) + [1]
    assert (len(flow.buffer), flow.accounting.entries.failed_submissions) == (1, [1])
    assert (flow.gate.running, flow.num_pending_groups) == (0, 0)
    assert "no retry is left of 20 after failures that other groups may have" in caplog.text


def fails(*outcomes: str) -> None:
    """Run groups with these outcomes and wait; raise the error that ended the run."""
    receipts: dict[str, GroupReceipt | BaseException] = {
        "dead": EngineError("died"),
        "unscored": group(0, scored=False, member_errors=("first", "verifier raised")),
        "empty": GroupReceipt(0, (), ()),
    }
    script = [
        group(i) if outcome == "good" else receipts[outcome] for i, outcome in enumerate(outcomes)
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
    with pytest.raises(EngineError, match=r"^2 groups in a row failed"):
        fails("dead", "dead", "dead", "dead")
    with pytest.raises(ArealFlowError, match=r"2 groups in a row failed.*: verifier raised"):
        fails("dead", "unscored")
    with pytest.raises(ArealFlowError, match=r"2 groups in a row failed.*: no member was scored"):
        fails("dead", "empty")


def test_failures_of_groups_are_not_in_a_row_if_a_later_group_succeeded() -> None:
    """Groups that are tried again fail together, after the groups beside them have succeeded."""
    parts = Parts(Rollouts([EngineError("died")] * 2 + [group(2)] + [EngineError("died")] * 2))

    async def scenario() -> Flow:
        flow = parts.flow(max_attempts=2, max_consecutive_failures=2, max_staleness=9)
        for _ in range(3):
            flow.submit()
        await asyncio.sleep(RETRY_DELAY_S / 2)
        await flow.commit_written()
        await asyncio.sleep(60)
        flow.notify()
        await flow.wait_for_change(flow.num_changes - 1)
        return flow

    flow = run(scenario())
    assert sorted(flow.accounting.entries.failed_submissions) == [0, 1]
    assert len(flow.buffer) == 1


def test_error_that_nobody_expected_ends_the_run() -> None:
    parts = Parts(Rollouts([KeyError("prompt")]))

    async def scenario() -> None:
        flow = parts.flow()
        flow.submit()
        while True:
            await flow.wait_for_change(flow.num_changes)

    with pytest.raises(ArealFlowError, match=r"an episode ended unexpectedly: KeyError\('prompt'"):
        run(scenario())


def test_group_that_is_being_written_is_pending_and_keeps_no_other_from_the_generators() -> None:
    parts = Parts(Rollouts(duration_s=1.0, write_s=9.0))

    async def scenario() -> Flow:
        flow = parts.flow(max_running=2, max_staleness=1)
        flow.submit()
        assert not flow.gate.admits_group()
        await asyncio.sleep(2)
        assert flow.gate.admits_group()
        assert (flow.num_pending_groups, flow.gate.running, flow.gate.outstanding) == (1, 0, 2)
        await asyncio.sleep(60)
        await flow.commit_written()
        assert (flow.num_pending_groups, flow.num_ready) == (0, 2)
        return flow

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
    parts = Parts(
        Rollouts([group(i, engine_stats=engine_stats) for i, engine_stats in enumerate(stats)])
    )

    async def scenario() -> Flow:
        flow = parts.flow(
            InitialState(engine_totals=(EngineStats("a", busy_s=1.0),)), max_staleness=9
        )
        await roll_out(flow, len(busy))
        return flow

    assert run(scenario()).accounting.entries.generate_s == 2.0 + 0.5 + 0.25


def test_busy_fraction_is_of_the_time_that_reports_cover() -> None:
    """Groups of long episodes are committed together, in a step that took a second."""
    stats = [EngineStats("a", busy_s=b, elapsed_s=e) for b, e in ((3.0, 4.0), (8.0, 10.0))]
    parts = Parts(
        Rollouts([group(i, engine_stats=engine_stats) for i, engine_stats in enumerate(stats)])
    )

    async def scenario() -> None:
        flow = parts.flow(
            InitialState(engine_totals=(EngineStats("a", busy_s=1.0, elapsed_s=1.5),)),
            max_staleness=9,
        )
        await roll_out(flow, 2)
        parts.cluster.spans |= {t.trajectory_id: t.version_spans for t in parts.log.committed}
        await train_once(flow)

    run(scenario())
    (row,) = parts.log.rows
    assert row["generate_s"] == 7.0
    assert row["generate_s"] > row["step_s"], "the clock of rows does not jump"
    assert row["metrics"]["speed/generators_observed_s"] == 8.5
    assert row["metrics"]["speed/generators_busy_fraction"] == 7.0 / 8.5


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
        assert flow.watermark == 0, "nothing is claimed before it is known"
        await flow.commit_written()
        assert flow.watermark == 2
        assert len(flow.buffer) == 1
        await flow.commit_written()
        assert flow.watermark == 4
        assert len(flow.buffer) == 2
        await flow.commit_written()
        assert parts.log.num_commits == 2, "there was nothing to commit"

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
