"""The stages of a flow, one at a time, each with scripted backends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from areal_flow.core.errors import ArealFlowError
from areal_flow.core.types import (
    Discard,
    StepRequest,
    trajectory_id,
)
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState
from areal_flow.flow.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.log.ledger_row import Provenance, batch_digest
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at
from tests.flow_parts import Parts, roll_out, run, train_once, waiting

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
        await flow.wait_until_released()
        await train_once(flow)

    run(scenario())
    first, second = parts.log.rows
    ids = (trajectory_id(4, 0), trajectory_id(4, 1))
    assert parts.cluster.requests[0] == StepRequest(1, "w0", 0, ids, batch_digest(0, ids), 4)
    assert (second["step"], second["policy_version"]) == (2, 1)
    assert second["parent_hash"] == first["weights_hash"]
    assert (first["num_waiting_tokens"], second["num_waiting_tokens"]) == (8, 0)
    assert (first["num_trained_tokens"], first["wait_s"]) == (8, 1.25)
    assert (first["writer_epoch"], first["next_submission_index"]) == (6, 6)
    assert 0 <= second["step_s"] < 60
    assert "speed/weights_num_served" not in first["metrics"]
    assert second["metrics"]["speed/weights_num_served"] == parts.cluster.num_generators
    assert second["metrics"]["speed/weights_stall_s_max"] == 0.25


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


def ids_of(index: int) -> tuple[str, ...]:
    return (trajectory_id(index, 0), trajectory_id(index, 1))


def test_next_batch_is_named_once_while_a_step_runs() -> None:
    """At once if it is complete already, else when it is; not once its step could begin."""
    parts = Parts()

    async def scenario() -> None:
        flow = parts.flow(waiting(0, 1), max_staleness=4)
        await train_once(flow)
        assert parts.cluster.named_ahead == [ids_of(1)]
        training = asyncio.create_task(train_once(flow))
        await asyncio.sleep(0)
        assert len(parts.cluster.named_ahead) == 1
        for _ in range(2):
            flow.submit()
            await asyncio.sleep(0.1)
            await flow.commit_written()
        await training
        flow.submit()
        await asyncio.sleep(0.1)
        await flow.commit_written()
        await flow.close()

    run(scenario())
    assert parts.cluster.named_ahead == [ids_of(1), ids_of(2)]
    assert [request.trajectory_ids for request in parts.cluster.requests] == [
        ids_of(0),
        ids_of(1),
    ]


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


def test_stop_ends_training_that_waits_for_a_batch() -> None:
    async def scenario() -> Any:
        flow = Parts().flow()
        training = asyncio.create_task(flow.wait_for_batch())
        await asyncio.sleep(1)
        assert not training.done()
        flow.request_stop()
        return await asyncio.wait_for(training, 1)

    assert run(scenario()) is None


def test_weights_that_cannot_be_announced_end_the_run() -> None:
    parts = Parts()

    async def fail(version: int, served_hash: str) -> None:
        raise OSError(f"no weights {version}")

    parts.cluster.load_everywhere = fail  # type: ignore[method-assign]

    async def scenario() -> None:
        flow = parts.flow(waiting(0))
        await train_once(flow)
        await flow.wait_for_change(flow.num_changes)

    with pytest.raises(ArealFlowError, match=r"could not be announced: OSError\('no weights 1'\)"):
        run(scenario())


# Where a run begins


def test_discards_of_a_recovery_are_in_the_next_row() -> None:
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
        return flow.next_submission_index

    assert run(scenario()) == 7
    assert [episode.submission_index for episode in parts.rollouts.episodes] == [1, 3, 5, 6]


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


def test_new_generators_get_work_at_once_also_where_nothing_else_happens() -> None:
    parts = Parts()

    async def scenario() -> None:
        flow = parts.flow(max_running=0)
        running = asyncio.create_task(run_async_schedule(flow))
        await asyncio.sleep(1)
        assert parts.rollouts.episodes == []
        flow.set_max_running(64)
        await asyncio.sleep(1)
        assert len(parts.rollouts.episodes) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await flow.close()

    parts.rollouts.duration_s = 1000.0
    run(scenario())


def test_schedule_leaves_no_stage_behind() -> None:
    async def scenario(schedule: Any) -> set[Any]:
        await schedule(Parts().flow(num_steps=0, max_running=0))
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert run(scenario(run_async_schedule)) == set()
    assert run(scenario(run_barrier_schedule)) == set()


def test_every_waiter_is_woken_by_a_change_it_has_not_seen() -> None:
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
