"""Costs of runs by use, role, step and trajectory, for the command and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from math import inf
from typing import Any, get_args

import polars as pl

from areal_flow.config.cluster import Priced
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.flow.costs import (
    COLUMNS,
    ROLES,
    USES,
    CostAccounting,
    StepCost,
    by_use,
    read_workers,
)
from areal_flow.log.ledger import LedgerTail
from areal_flow.log.queries import Run
from areal_flow.planning.gpus import GPUS
from pipelines.console.tables import Report, Table

PRICED = get_args(Priced)
_TRAJECTORIES = """
SELECT trajectory_id, status, t.step, reason, num_tokens,
       coalesce(num_trained_tokens, 0)::BIGINT AS num_trained_tokens,
       num_tokens * coalesce(
           CASE status WHEN 'trained' THEN trained ELSE discarded END,
           $waiting / nullif(sum(num_tokens) FILTER (status = 'waiting') OVER (), 0),
           0
       ) AS cost
FROM trajectories AS t LEFT JOIN token_costs AS c ON t.step = c.step
ORDER BY cost DESC, trajectory_id
"""


def costs_of(run: Run, prices: Any = None) -> tuple[dict[str, Any], list[StepCost]]:
    """Return a run's costs so far, in total and by step; `prices` override those of its recipe."""
    layout = run.layout
    if not (layout.workers.is_file() and layout.steps.exists()):
        raise RunError(
            f"expected {layout.workers.name} and a ledger in {layout.root}, found none: the run "
            "was not trained, or by an older version"
        )
    workers = read_workers(layout.workers, {**run.recipe.cluster.prices, **(prices or {})})
    accounting, steps, num_trained = CostAccounting(), list[StepCost](), 0
    for rows in LedgerTail(layout, COLUMNS, since=1).batches():
        steps += [accounting.add(row, workers) for row in rows]
        num_trained += sum(row["num_trained_tokens"] for row in rows)
    whole = accounting.whole(workers)
    costs = {
        "run": layout.name,
        "unit": "money" if workers.has_prices else "device seconds",
        "by_use": (of_uses := by_use(whole)),
        "by_role": {role: {use: whole[role, use] for use in USES} for role in ROLES},
        "million_trained_tokens": 1e6 * of_uses["total"] / num_trained if num_trained else None,
    }
    return costs, steps


def trajectory_costs(run: Run, steps: Iterable[StepCost], *, waiting: float) -> pl.DataFrame:
    """Return the cost of each trajectory, costliest first.

    All tokens of a step cost the same, and so do all tokens that wait.
    """
    tokens = [
        (step.step, sum(step.token.values()), step.token["generator"] + step.token["reward"])
        for step in steps
    ]
    schema = {"step": pl.Int64, "trained": pl.Float64, "discarded": pl.Float64}
    with closing(run.database()) as database:
        database.register("token_costs", pl.DataFrame(tokens, schema, orient="row").to_arrow())
        relation = database.sql(_TRAJECTORIES, params={"waiting": waiting})
        return pl.DataFrame(relation.to_arrow_table())


def report_costs(
    runs: Sequence[Run], prices: Mapping[str, float], *, by_step: bool, num_trajectories: int
) -> Report:
    data, parts = list[dict[str, Any]](), list[Any]()
    for run in runs:
        costs, of_steps = costs_of(run, prices)
        rows = trajectory_costs(run, of_steps, waiting=costs["by_use"]["waiting"])
        discarded = rows.filter(status="discarded").group_by("reason").agg(pl.sum("cost"))
        reasons = dict(discarded.sort("reason").iter_rows())
        steps = [{"step": each.step, **by_use(each.accounts)} for each in of_steps] * by_step
        costliest = rows.head(num_trajectories).to_dicts()
        details = {"discarded_by_reason": reasons, "steps": steps, "trajectories": costliest}
        data.append({**costs, **details})
        roles = [{"role": r, **of, "total": sum(of.values())} for r, of in costs["by_role"].items()]
        roles.append({"role": "all", **costs["by_use"]})
        parts.append(Table(_texts(roles), f"{costs['run']}, {costs['unit']}"))
        parts += [f"Discarded, {why}: {amount(cost)}" for why, cost in reasons.items()]
        if million := costs["million_trained_tokens"]:
            parts.append(f"A million trained tokens, all included: {amount(million)}")
        tables = {"By step": steps, "The costliest trajectories": costliest}
        parts += [Table(_texts(table), title) for title, table in tables.items() if table]
    return Report({"runs": data}, parts)


def _texts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: amount(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def amount(value: float) -> str:
    """Format an amount with four significant digits, and at least its integer part."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def parse_prices(given: Sequence[str]) -> dict[str, float]:
    """Return prices by role or kind, from `KIND=PRICE`, or `PRICE` of a GPU; a GPU has its own."""
    prices = dict[str, float]()
    for text in given:
        kind, _, price = text.rpartition("=")
        with suppress(ValueError):
            prices[kind or "gpu"] = GPUS[price].price_per_hour if price in GPUS else float(price)
        if not 0 <= prices.get(kind or "gpu", -1.0) < inf or (kind or "gpu") not in PRICED:
            raise ConfigError(
                f"--price {text}: expected PRICE, or KIND=PRICE with one of {', '.join(PRICED)}; "
                f"a price is 0 or more, or one of {', '.join(GPUS)}"
            )
    return prices
