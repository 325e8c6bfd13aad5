"""Slots of the engine: who decodes where, first come first served."""

from __future__ import annotations

from areal_flow.generation.scheduler import Member, SlotScheduler


def admitted(scheduler: SlotScheduler) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return (request, [(slot, member)]) of what starts now."""
    return [
        (request_id, [(slot, scheduler.running[slot].index) for slot in slots])
        for request_id, slots in scheduler.admit()
    ]


def test_members_take_slots_in_order_grouped_by_request() -> None:
    scheduler = SlotScheduler(4)
    scheduler.add("a", 3)
    scheduler.add("b", 2)
    assert scheduler.admit() == [("a", [0, 1, 2]), ("b", [3])]
    assert scheduler.running == {
        **{slot: Member("a", slot) for slot in range(3)},
        3: Member("b", 0),
    }
    assert admitted(scheduler) == []


def test_next_member_takes_the_slot_that_was_freed() -> None:
    scheduler = SlotScheduler(2)
    scheduler.add("a", 4)
    assert admitted(scheduler) == [("a", [(0, 0), (1, 1)])]
    scheduler.finish(0)
    assert scheduler.running == {1: Member("a", 1)}
    assert admitted(scheduler) == [("a", [(0, 2)])]
    scheduler.finish(1)
    scheduler.finish(0)
    assert admitted(scheduler) == [("a", [(0, 3)])]


def test_group_waits_until_its_last_member_has_started() -> None:
    scheduler = SlotScheduler(2)
    scheduler.add("a", 2)
    scheduler.add("b", 2)
    assert scheduler.still_waiting("a")
    scheduler.admit()
    assert not scheduler.still_waiting("a")
    assert scheduler.still_waiting("b")
    scheduler.finish(1)
    scheduler.admit()
    assert scheduler.still_waiting("b")
    scheduler.finish(0)
    scheduler.admit()
    assert not scheduler.still_waiting("b")


def test_there_is_work_while_a_member_waits_or_runs() -> None:
    scheduler = SlotScheduler(1)
    assert not scheduler.has_work()
    scheduler.add("a", 1)
    assert scheduler.has_work()
    scheduler.admit()
    assert scheduler.has_work()
    scheduler.finish(0)
    assert not scheduler.has_work()


def test_cancelled_group_leaves_queue_and_slots_and_no_other_does() -> None:
    scheduler = SlotScheduler(3)
    scheduler.add("a", 2)
    scheduler.add("b", 3)
    scheduler.admit()
    scheduler.cancel("b")
    assert scheduler.running == {0: Member("a", 0), 1: Member("a", 1)}
    assert not scheduler.still_waiting("b")
    scheduler.add("c", 2)
    scheduler.cancel("a")
    assert [request for request, _ in admitted(scheduler)] == ["c"]
    assert sorted(member.index for member in scheduler.running.values()) == [0, 1]
