"""Computes what the page `/rl` shows, from rows of the log and from the flow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import polars as pl

from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.flow import bottleneck
from areal_flow.flow.flow import Flow

TRAINER = "trainer"
CURVES = ("reward_mean", PASS_RATE, "completion_tokens_mean", "staleness_mean", "staleness_max")
TIMES = ("submitted_at", "started_at", "finished_at", "scored_at")
_NUMBERS = ("committed_at", *CURVES, *bottleneck.COLUMNS)
_STEP = {"step": pl.Int64, "trajectory_watermark": pl.Int64, **dict.fromkeys(_NUMBERS, pl.Float64)}


def steps_of(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return those columns and metrics of the ledger's rows that the page needs."""
    timed = ({**row, "committed_at": row["committed_at"].timestamp()} for row in rows)
    flat = ({**row["metrics"], **row} for row in timed)
    return pl.DataFrame([{name: row.get(name) for name in _STEP} for row in flat], _STEP)


def groups_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each group of the log's rows; times are in seconds since 1970."""
    tokens = pl.col("version_spans").list.eval(pl.element().struct.field("length")).list.sum()
    timed = rows.with_columns(pl.col(TIMES).dt.epoch("us") / 1e6)
    first, last = pl.col(TIMES[:2]).min(), pl.col(TIMES[2:]).max()
    return timed.group_by("group_id", "generator").agg(first, last, num_tokens=tokens.sum())


def work_spans(
    steps: pl.DataFrame, groups: pl.DataFrame, *, at_work: Mapping[str, bool], now: float
) -> pl.DataFrame:
    """Return who (`lane`) worked from when (`left`) to when (`right`), in seconds from now.

    A generator works while it has a group, the trainer while it reads, trains and stages. Who is
    at work now has a `pale` span since its last one: what it does is not in the log yet.
    """
    seconds = pl.sum_horizontal("seconds_read", "seconds_train", "seconds_stage")
    ended = pl.col("committed_at")
    trained = steps.select(lane=pl.lit(TRAINER), left=ended - seconds, right=ended)
    generated = groups.select(lane="generator", left=TIMES[1], right=TIMES[2])
    is_apart = pl.col("left") > pl.col("right").cum_max().shift(1).over("lane")
    spans = (
        pl.concat([trained, generated])
        .with_columns(pl.col("left", "right") - now)
        .sort("lane", "left")
        .group_by("lane", is_apart.fill_null(False).cum_sum().over("lane").alias("span"))
        .agg(pl.col("left").min(), pl.col("right").max(), pale=pl.lit(False))
        .drop("span")
        .sort("lane", "left")
    )
    for lane, works in at_work.items():
        known = spans.filter(lane=lane)["right"].max() or spans["left"].min()
        unknown = [lane, known if works else 0.0, 0.0, True]
        spans = spans.vstack(pl.DataFrame([unknown], spans.schema, orient="row"))
    return spans


def generator_speeds(groups: pl.DataFrame, *, since: float, now: float) -> pl.DataFrame:
    """Return the tokens a second of each generator, of the groups that it finished meanwhile."""
    finished = groups.filter(pl.col("finished_at") > since).group_by(lane="generator")
    speeds = finished.agg(right=pl.col("num_tokens").sum() / (now - since)).sort("lane")
    return speeds.with_columns(pl.Series("text", [f"{speed:,.0f}" for speed in speeds["right"]]))


def flow_stages(flow: Flow, steps: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the way of a trajectory through the run: how many, and how long it waits there."""
    gate, so_far = flow.gate, flow.accounting
    scoring = max(0, flow.num_pending_groups * gate.settings.group_size - gate.running)
    waits: list[Any] = [(groups[end] - groups[begin]).mean() for begin, end in pairwise(TIMES)]
    queued, generated, scored, trainer = (s or 0.0 for s in (*waits, steps["seconds_wait"].mean()))
    max_trajectories, committed = (
        max(1, gate.running, scoring, flow.num_ready),
        max(1, so_far.committed),
    )
    rows = [
        (
            "running",
            gate.running,
            max_trajectories,
            f"now; queued {queued:.1f} s, generated {generated:.1f} s",
        ),
        ("scored", scoring, max_trajectories, f"now; queued and scored {scored:.1f} s"),
        ("committed", so_far.committed, committed, "tokens"),
        (
            "ready",
            flow.num_ready,
            max_trajectories,
            f"now; the trainer waits {trainer:.1f} s a step",
        ),
        ("trained", so_far.trained, committed, "tokens"),
        ("discarded", so_far.discarded, committed, "tokens"),
    ]
    shown = [(name, number / of, f"{number:,} {text}") for name, number, of, text in rows]
    return pl.DataFrame(shown, ["lane", "right", "text"], orient="row")
