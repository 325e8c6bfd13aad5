"""The numbers of the page `/rl`, from rows of the log and a flow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from areal_flow.cluster.rl_page import (
    TRAINER,
    flow_stages,
    generator_speeds,
    groups_of,
    steps_of,
    work_spans,
)
from areal_flow.log.ledger_row import OBSERVED
from tests.flow_parts import Parts, run, train_once, waiting
from tests.tracked_runs import BEGAN, step_row

NOW = BEGAN.timestamp() + 10


def step(number: int, **columns: Any) -> dict[str, Any]:
    """Return the ledger's row of a step that ended so many seconds after the beginning."""
    seconds = {"read_s": 0.25, "train_s": 0.5, "stage_s": 0.0}
    return {**step_row(number), **seconds, **columns}


def group(group_id: str, generator: str, *seconds: float, num_tokens: int = 5) -> dict[str, Any]:
    """Return a row of the log, of a group's only member."""
    names = ("submitted_at", "started_at", "finished_at", "scored_at")
    times = [BEGAN + timedelta(seconds=second) for second in seconds]
    spans = [{"version": 0, "length": num_tokens - 1}, {"version": 1, "length": 1}]
    row = {"group_id": group_id, "generator": generator, "version_spans": spans}
    return row | dict(zip(names, times, strict=True))


def spans_of(*rows: dict[str, Any], **options: Any) -> list[tuple[Any, ...]]:
    groups = groups_of(pl.DataFrame([*rows]))
    return work_spans(steps_of([step(3)]), groups, now=NOW, **options).rows()


def test_metrics_stand_beside_columns_and_a_missing_one_is_null() -> None:
    table = steps_of([step(1), step(2, metrics={OBSERVED: 0.5})])
    assert table["rollout/pass_rate"].to_list() == [0.25, None]
    assert table[OBSERVED].to_list() == [None, 0.5]
    assert table["committed_at"].to_list() == [BEGAN.timestamp() + 1, BEGAN.timestamp() + 2]


def test_a_group_begins_with_its_first_member_and_ends_with_its_last() -> None:
    rows = [group("a", "g", 0, 1, 2, 4), group("a", "g", 0, 1.5, 3, 4)]
    (row,) = groups_of(pl.DataFrame(rows)).to_dicts()
    began = BEGAN.timestamp()
    assert [row[name] - began for name in ("started_at", "finished_at")] == [1, 3]
    assert row["num_tokens"] == 10


def test_groups_that_overlap_are_one_span_and_gaps_are_idle() -> None:
    first, second, later = (
        group("a", "generator-0", 0, 1, 5, 5),
        group("b", "generator-0", 0, 2, 3, 5),
        group("c", "generator-0", 0, 6, 7, 9),
    )
    inside, touching = group("d", "generator-0", 0, 4, 5.5, 9), group("e", "other", 0, 2, 4, 5)
    assert spans_of(first, second, later, inside, touching, at_work={}) == [
        ("generator-0", -9, -4.5, False),
        ("generator-0", -4, -3, False),
        ("other", -8, -6, False),
        (TRAINER, -7.75, -7, False),
    ]


def test_current_work_is_a_pale_span_after_the_last_logged_one() -> None:
    at_work = {"generator-0": True, "generator-1": True, "generator-2": False, TRAINER: True}
    spans = spans_of(group("a", "generator-0", 0, 1, 5, 5), at_work=at_work)
    assert [row for row in spans if row[3]] == [
        ("generator-0", -5, 0, True),
        ("generator-1", -9, 0, True),
        ("generator-2", 0, 0, True),
        (TRAINER, -7, 0, True),
    ]


def test_speed_counts_what_each_generator_finished_in_the_time_shown() -> None:
    rows = [group("a", "x", 0, 1, 2, 3), group("b", "x", 0, 4, 5, 6), group("c", "y", 0, 4, 9, 9)]
    groups = groups_of(pl.DataFrame([*rows, group("d", "y", 0, 4, 9, 9, num_tokens=19_995)]))
    speeds = generator_speeds(groups, since=NOW - 8, now=NOW)
    assert speeds.rows() == [("x", 5 / 8, "1"), ("y", 2500.0, "2,500")]


def test_stages_count_trajectories_now_and_tokens_so_far_with_their_waits() -> None:
    async def train_and_go_on() -> pl.DataFrame:
        flow = Parts().flow(waiting(0, 1, 2), max_staleness=9)
        await train_once(flow)
        flow.submit()
        groups = groups_of(pl.DataFrame([group("a", "g", 0, 1, 3, 6.5)]))
        shown = flow_stages(flow, steps_of([step(1, wait_s=1.25)]), groups)
        await flow.close()
        return shown

    running, scored, committed, ready, trained, discarded = run(train_and_go_on()).rows()
    assert running == ("running", 0.5, "2 now; queued 1.0 s, generated 2.0 s")
    assert scored == ("scored", 0.0, "0 now; queued and scored 3.5 s")
    assert committed == ("committed", 1.0, "24 tokens")
    assert ready == ("ready", 1.0, "4 now; the trainer waits 1.2 s a step")
    assert trained == ("trained", pytest.approx(1 / 3), "8 tokens")
    assert discarded == ("discarded", 0.0, "0 tokens")
