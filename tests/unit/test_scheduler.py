"""Slots of the engine: first come, first served."""

from __future__ import annotations

import pytest

from areal_flow.core.errors import EngineError
from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.rollout.engines.scheduler import SampledSequence, SlotScheduler
from tests.plain import plain


def add(scheduler: SlotScheduler, name: str, num_members: int) -> None:
    """Queue a group whose members end with token 0, or with their second token."""
    sampling = Sampling(max_new_tokens=2, stop_token_ids=(0,))
    scheduler.add(GroupRequest(name, as_tokens([1]), tuple(range(num_members)), sampling))


def end(scheduler: SlotScheduler, *slots: int) -> list[tuple[str, list[Completion]]]:
    """Let the members in these slots sample a stop token."""
    for slot in slots:
        scheduler.running[slot].append(0, -1.0, 3)
    return scheduler.finish()


def running(scheduler: SlotScheduler) -> dict[int, tuple[str, int]]:
    return {slot: (m.request.request_id, m.index) for slot, m in scheduler.running.items()}


def admitted(scheduler: SlotScheduler) -> dict[int, tuple[str, int]]:
    """Return who starts now, by slot."""
    before = running(scheduler)
    scheduler.admit()
    return {slot: member for slot, member in running(scheduler).items() if slot not in before}


def test_members_take_slots_in_order() -> None:
    scheduler = SlotScheduler(4)
    add(scheduler, "a", 3)
    add(scheduler, "b", 2)
    assert admitted(scheduler) == {0: ("a", 0), 1: ("a", 1), 2: ("a", 2), 3: ("b", 0)}
    assert admitted(scheduler) == {}


def test_member_without_a_place_waits_and_so_do_all_behind_it() -> None:
    scheduler = SlotScheduler(4)
    add(scheduler, "a", 3)
    scheduler.admit(lambda slot, member: member.index < 1)
    assert running(scheduler) == {0: ("a", 0)}
    scheduler.admit(lambda slot, member: member.index != 1)
    assert running(scheduler) == {0: ("a", 0)}


def test_preempted_member_goes_on_before_any_other_with_its_tokens() -> None:
    scheduler = SlotScheduler(2)
    add(scheduler, "a", 3)
    scheduler.admit()
    scheduler.running[1].append(5, -1.0, 0)
    scheduler.preempt(1)
    assert scheduler.has_started()
    assert scheduler.still_waiting("a")
    assert admitted(scheduler) == {1: ("a", 1)}
    assert list(scheduler.running[1].tokens) == [5]


def test_next_member_takes_the_slot_that_was_freed() -> None:
    scheduler = SlotScheduler(2)
    add(scheduler, "a", 4)
    assert admitted(scheduler) == {0: ("a", 0), 1: ("a", 1)}
    end(scheduler, 0)
    assert running(scheduler) == {1: ("a", 1)}
    assert admitted(scheduler) == {0: ("a", 2)}
    end(scheduler, 1)
    end(scheduler, 0)
    assert admitted(scheduler) == {0: ("a", 3)}


def test_group_waits_until_its_last_member_has_started() -> None:
    scheduler = SlotScheduler(2)
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    assert scheduler.still_waiting("a")
    scheduler.admit()
    assert not scheduler.still_waiting("a")
    assert scheduler.still_waiting("b")
    end(scheduler, 1)
    scheduler.admit()
    assert scheduler.still_waiting("b")
    end(scheduler, 0)
    scheduler.admit()
    assert not scheduler.still_waiting("b")


def test_cancelled_group_leaves_queue_and_slots_and_no_other_does() -> None:
    scheduler = SlotScheduler(3)
    add(scheduler, "a", 2)
    add(scheduler, "b", 3)
    scheduler.admit()
    scheduler.cancel("b")
    assert running(scheduler) == {0: ("a", 0), 1: ("a", 1)}
    assert not scheduler.still_waiting("b")
    add(scheduler, "c", 2)
    scheduler.cancel("a")
    assert sorted(admitted(scheduler).values()) == [("c", 0), ("c", 1)]


def test_group_is_complete_when_its_last_member_has_ended() -> None:
    scheduler = SlotScheduler(2)
    add(scheduler, "a", 2)
    add(scheduler, "b", 1)
    scheduler.admit()
    assert scheduler.finish() == []
    assert end(scheduler, 1) == []
    scheduler.admit()
    ((name, (only,)),) = end(scheduler, 1)
    assert (name, plain(only)) == ("b", [[0], [-1.0], [[3, 1]], "stop"])
    scheduler.running[0].append(7, -2.0, 3)
    assert scheduler.finish() == []
    scheduler.running[0].append(7, -3.0, 4)
    ((name, members),) = scheduler.finish()
    assert name == "a"
    assert plain(members) == [
        [[7, 7], [-2.0, -3.0], [[3, 1], [4, 1]], "length"],
        [[0], [-1.0], [[3, 1]], "stop"],
    ]
    assert not scheduler.has_work()


def test_cache_lacks_the_keys_of_the_newest_token_only() -> None:
    request = GroupRequest("a", as_tokens([4, 5, 6]), (1,), Sampling(4))
    sequence = SampledSequence(request, 0, request.sampling.distribution)
    sequence.append(7, -1.0, 0)
    assert (sequence.num_cached, sequence.finish_reason) == (3, None)
    sequence.append(8, -1.0, 0)
    assert sequence.num_cached == 4
    assert sequence.prefix(0, 4).tolist() == [4, 5, 6, 7]
    assert sequence.prefix(2, 5).tolist() == [6, 7, 8]
    assert sequence.prefix(3, 4).tolist() == [7]


def test_group_is_added_once_and_equal_sampling_is_one_object() -> None:
    scheduler = SlotScheduler(2)
    add(scheduler, "a", 1)
    with pytest.raises(EngineError, match="a is running already"):
        add(scheduler, "a", 1)
    add(scheduler, "b", 1)
    scheduler.admit()
    first, second = (scheduler.running[slot].distribution for slot in (0, 1))
    assert first is second
    assert first == Sampling(max_new_tokens=2, stop_token_ids=(0,)).distribution
