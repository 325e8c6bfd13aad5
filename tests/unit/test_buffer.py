"""The buffer: order, eviction, members that cannot be trained."""

from __future__ import annotations

import pytest

from areal_flow.config import build_recipe
from areal_flow.core.types import GroupReceipt, TrajectoryReceipt, VersionSpan, trajectory_id
from areal_flow.flow.buffer import Batch, Buffer


def make_buffer(*, groups_per_step: int, max_staleness: int, group_filter: str = "all") -> Buffer:
    table = {
        "controller": {
            "batch_size": 4 * groups_per_step,
            "group_size": 4,
            "max_staleness": max_staleness,
        },
        "algorithm": {"num_minibatches": 1, "group_filter": group_filter},
    }
    return Buffer(build_recipe(table, source="a test"))


def ids(batch: Batch | None) -> list[str]:
    return [trajectory.trajectory_id for trajectory in batch or ()]


def group(
    index: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0)
) -> GroupReceipt:
    members = tuple(
        TrajectoryReceipt(trajectory_id(index, member), (VersionSpan(version, 4),), reward, "stop")
        for member, reward in enumerate(rewards)
    )
    return GroupReceipt(index, (), members)


def test_oldest_submissions_are_taken_whoever_finished_first() -> None:
    buffer = make_buffer(groups_per_step=2, max_staleness=4)
    for index in (7, 3, 5):
        assert buffer.add(group(index), policy_version=0) == []
    assert ids(buffer.take()) == [trajectory_id(i, m) for i in (3, 5) for m in (0, 1)]
    assert buffer.take() is None
    assert len(buffer) == 1


def test_straggler_is_not_waited_for() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=4)
    buffer.add(group(9), policy_version=0)
    assert ids(buffer.take()) == [trajectory_id(9, member) for member in (0, 1)]


def test_stale_work_is_evicted_and_counted() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    buffer.add(group(0, version=3), policy_version=3)
    assert buffer.evict(policy_version=4) == []
    discards = buffer.evict(policy_version=5)
    assert [(d.trajectory_id, d.num_tokens, d.reason) for d in discards] == [
        (trajectory_id(0, 0), 4, "stale"),
        (trajectory_id(0, 1), 4, "stale"),
    ]
    assert len(buffer) == 0
    assert buffer.num_waiting_tokens == 0


def test_only_the_added_group_is_examined() -> None:
    buffer = make_buffer(groups_per_step=2, max_staleness=1)
    buffer.add(group(0, version=0), policy_version=0)
    assert buffer.add(group(1, version=5), policy_version=5) == []
    assert len(buffer.evict(policy_version=5)) == 2
    assert ids(buffer.take()) == []
    assert len(buffer) == 1


def test_unscored_members_are_discarded_and_the_group_goes_on() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    discards = buffer.add(group(0, rewards=(None, 1.0, 0.0)), policy_version=0)
    assert [d.reason for d in discards] == ["verifier_error"]
    assert ids(buffer.take()) == [trajectory_id(0, 1), trajectory_id(0, 2)]


def test_members_whose_workflow_failed_are_discarded_for_that() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    good = group(0, rewards=(1.0, 0.0, None)).trajectories
    failed = TrajectoryReceipt(trajectory_id(0, 3), (), None, "error")
    discards = buffer.add(GroupReceipt(0, (), (*good, failed)), policy_version=7)
    assert [(d.reason, d.num_tokens) for d in discards] == [
        ("verifier_error", 4),
        ("workflow_error", 0),
        ("stale", 4),
        ("stale", 4),
    ]


def test_group_without_any_score_is_not_kept() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    assert len(buffer.add(group(0, rewards=(None, None)), policy_version=0)) == 2
    assert len(buffer) == 0


def test_group_that_the_algorithm_would_not_train_is_discarded_and_frees_its_slot() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=2, group_filter="mixed_rewards")
    discards = buffer.add(group(0, rewards=(1.0, None, 1.0)), policy_version=0)
    assert [d.reason for d in discards] == ["verifier_error", "group_filter", "group_filter"]
    assert len(buffer) == 0
    assert buffer.add(group(1, rewards=(1.0, 0.0)), policy_version=0) == []
    assert len(buffer) == 1


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=2, group_filter="mixed_rewards")
    discards = buffer.add(group(0, rewards=(0.1 + 0.2, 0.3)), policy_version=0)
    assert [d.reason for d in discards] == ["group_filter", "group_filter"]
    assert buffer.add(group(1, rewards=(0.3 + 1e-6, 0.3)), policy_version=0) == []


def test_group_that_arrives_too_old_is_discarded_at_once() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=2)
    assert len(buffer.add(group(0, version=0), policy_version=3)) == 2
    assert len(buffer) == 0


def test_fewer_groups_than_a_step_needs_are_left_alone() -> None:
    buffer = make_buffer(groups_per_step=3, max_staleness=4)
    for index in (1, 0):
        buffer.add(group(index), policy_version=0)
    assert buffer.take() is None
    assert (len(buffer), buffer.num_waiting_tokens) == (2, 16)
    buffer.add(group(2), policy_version=0)
    assert ids(buffer.take()) == [trajectory_id(i, m) for i in (0, 1, 2) for m in (0, 1)]
    assert (len(buffer), buffer.num_waiting_tokens) == (0, 0)


def test_bound_is_the_last_version_that_still_trains() -> None:
    for policy_version, num_left in ((4, 2), (5, 2), (6, 0)):
        buffer = make_buffer(groups_per_step=1, max_staleness=2)
        discards = buffer.add(group(0, version=3), policy_version=policy_version)
        assert (2 * len(buffer), len(discards)) == (num_left, 2 - num_left)


def test_group_goes_on_with_the_members_that_have_a_fresh_token() -> None:
    spans = ((VersionSpan(0, 4),), (VersionSpan(0, 3), VersionSpan(2, 1)))
    members = tuple(
        TrajectoryReceipt(trajectory_id(9, member), member_spans, 1.0, "stop")
        for member, member_spans in enumerate(spans)
    )
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    discards = buffer.add(GroupReceipt(9, (), members), policy_version=3)
    assert [(d.trajectory_id, d.num_tokens, d.reason) for d in discards] == [
        (trajectory_id(9, 0), 4, "stale")
    ]
    assert (len(buffer), buffer.num_waiting_tokens) == (1, 4)
    assert ids(buffer.take()) == [trajectory_id(9, 1)]


def test_a_group_is_added_once() -> None:
    buffer = make_buffer(groups_per_step=2, max_staleness=1)
    buffer.add(group(0), policy_version=0)
    with pytest.raises(AssertionError, match="committed twice"):
        buffer.add(group(0), policy_version=0)


def test_unscored_members_of_an_old_group_are_discarded_for_what_came_first() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=0)
    discards = buffer.add(group(0, version=0, rewards=(1.0, None)), policy_version=1)
    assert [d.reason for d in discards] == ["verifier_error", "stale"]
    assert [d.num_tokens for d in discards] == [4, 4]
