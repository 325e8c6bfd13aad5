"""Computes what the page shows: from steps and groups of the log, and from the flow. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import polars as pl

from areal_flow.controller import bottleneck
from areal_flow.controller.flow import Flow
from areal_flow.evaluation.pass_rates import PASS_RATE

TRAINER = "trainer"
CURVES = {
    "reward": "reward_mean",
    "pass rate": PASS_RATE,
    "length": "completion_tokens_mean",
    "mean": "staleness_mean",
    "max": "staleness_max",
}
"""Numbers of a step by what the page calls them."""
_NUMBERS = {*CURVES.values(), *bottleneck.COLUMNS}
_STEP = {"step": pl.Int64, "trajectory_watermark": pl.Int64} | dict.fromkeys(_NUMBERS, pl.Float64)


def steps_of(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return rows of the ledger with those columns and metrics that the page needs."""
    flat = ({**row["metrics"], **row} for row in rows)
    schema = {**_STEP, "committed_at": pl.Datetime("us", "UTC")}
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in flat], schema)


def groups_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each group of the log's rows."""
    tokens = pl.col("version_spans").list.eval(pl.element().struct.field("length")).list.sum()
    return rows.group_by("group_id").agg(
        pl.col("generator").first(),
        pl.col("submitted_at", "started_at").min(),
        pl.col("finished_at", "scored_at").max(),
        num_tokens=tokens.sum(),
    )


def work_spans(
    steps: pl.DataFrame, groups: pl.DataFrame, *, at_work: Collection[str], now: datetime
) -> pl.DataFrame:
    """Return who (`lane`) worked from when (`left`) to when (`right`), in seconds before now.

    A generator works while it has a group, the trainer while it reads, trains and stages. Who is
    at work now has a `pale` span since its last one: what it does is not in the log yet.
    """
    seconds = pl.sum_horizontal("seconds_read", "seconds_train", "seconds_stage")
    began = pl.col("committed_at") - pl.duration(microseconds=seconds * 1e6)
    trained = steps.select(lane=pl.lit(TRAINER), left=began, right="committed_at")
    generated = groups.select(lane="generator", left="started_at", right="finished_at")
    latest = pl.col("right").cum_max().shift(1).over("lane")
    spans = (
        pl.concat([trained, generated])
        .with_columns((pl.col("left", "right") - now).dt.total_microseconds() / 1e6)
        .sort("lane", "left")
        .with_columns(span=(pl.col("left") > latest).fill_null(True).cum_sum().over("lane"))
        .group_by("lane", "span")
        .agg(pl.col("left").min(), pl.col("right").max(), pale=pl.lit(False))
        .drop("span")
        .sort("lane", "left")
    )
    first = spans["left"].min()
    for lane in at_work:
        left = spans.filter(lane=lane)["right"].max() or first
        spans = spans.vstack(pl.DataFrame([[lane, left, 0.0, True]], spans.schema, orient="row"))
    return spans


def generator_speeds(groups: pl.DataFrame, *, since: datetime, now: datetime) -> pl.DataFrame:
    """Return the tokens a second of each generator, of the groups that it finished meanwhile."""
    tokens = groups.filter(pl.col("finished_at") > since).group_by(lane="generator")
    speed = pl.col("num_tokens").sum() / (now - since).total_seconds()
    return tokens.agg(right=speed, text=pl.format("{}", speed.round().cast(pl.Int64))).sort("lane")


def stages(flow: Flow, steps: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the way of a trajectory through the run: how many, and how long it waits there."""
    group_size, gate, tokens = flow.gate.settings.group_size, flow.gate, flow.accounting
    limit = flow.gate.settings.batch_size * (flow.gate.settings.max_staleness + 1)
    queued = _mean_s(groups["started_at"] - groups["submitted_at"])
    generated = _mean_s(groups["finished_at"] - groups["started_at"])
    scored = _mean_s(groups["scored_at"] - groups["finished_at"])
    waiting = steps["seconds_wait"].mean() or 0.0
    scoring = flow.num_pending_groups * group_size - gate.running

    def now(name: str, number: int, waits: str) -> tuple[str, float, str]:
        return name, number / limit, f"{number:,} now, {waits}"

    def so_far(name: str, number: int) -> tuple[str, float, str]:
        share = number / max(1, tokens.committed)
        return name, share, f"{number:,} tokens so far, {share:.0%}"

    rows = [
        now("running", gate.running, f"queued {queued:.1f} s, generated {generated:.1f} s"),
        now("scored", max(0, scoring), f"queued and scored {scored:.1f} s"),
        so_far("committed", tokens.committed),
        now("ready", flow.num_ready, f"the trainer waits {waiting:.1f} s a step"),
        so_far("trained", tokens.trained),
        so_far("discarded", tokens.discarded),
    ]
    return pl.DataFrame(rows, ["lane", "right", "text"], orient="row")


def _mean_s(durations: pl.Series) -> float:
    mean = durations.mean()
    return mean.total_seconds() if isinstance(mean, timedelta) else 0.0
