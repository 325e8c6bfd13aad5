"""Summarises a finished run: numbers for `summary.json`, a table, and the next commands to type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from areal_flow.layout import RunLayout
from areal_flow.types import EvaluationTable, PassRate
from pipelines.cli.run_log import say
from pipelines.cli.tables import Table

_TOTALS = """
SELECT
    (SELECT seconds_train FROM ledger WHERE step = 0) AS seconds_first_policy,
    sum(seconds_step) AS seconds_training,
    count(*) AS num_steps,
    sum(staleness_mean * num_trained_tokens) / nullif(sum(num_trained_tokens), 0) AS staleness_mean,
    max(staleness_max) AS staleness_max,
    sum(num_masked_tokens) / nullif(sum(num_trained_tokens + num_masked_tokens), 0)
        AS masked_fraction,
    sum(num_discarded_tokens)::BIGINT AS num_discarded_tokens,
    sum(num_generated_tokens) / nullif(seconds_training, 0) AS tokens_per_second_generated,
    sum(num_trained_tokens) / nullif(seconds_training, 0) AS tokens_per_second_trained,
    greatest(
        sum(seconds_generate) / $num_generators,
        sum(seconds_read + seconds_train + seconds_stage)
    ) AS seconds_longer_phase,
    seconds_longer_phase / nullif(greatest(seconds_longer_phase, seconds_training), 0)
        AS overlap_efficiency
FROM ledger WHERE step > 0
"""
"""Overlap efficiency is max(T_gen, T_train) / T_step: 1 when the longer phase hides the other."""


def summarise(
    held_out: Mapping[str, EvaluationTable], ledger: pa.Table, *, num_generators: int
) -> dict[str, Any]:
    """Return the summary of a whole run.

    Args:
        held_out: the evaluations "before" and "after", as far as there are any.
        ledger: every row, the genesis too.
    """
    from areal_flow.store.database import empty_database

    with empty_database() as connection:
        connection.register("ledger", ledger)
        found = connection.sql(_TOTALS, params={"num_generators": num_generators})
        (totals,) = found.project("* EXCLUDE seconds_longer_phase").to_arrow_table().to_pylist()
    by_difficulty = {
        name: {
            str(difficulty): {"pass_rate": rate.pass_rate, "n": rate.n, "mean_tokens": length}
            for difficulty, (rate, length) in table.by_difficulty.items()
        }
        for name, table in held_out.items()
    }
    return {
        **dict.fromkeys(("held_out_before", "held_out_after")),
        **{f"held_out_{name}": asdict(table.overall) for name, table in held_out.items()},
        **{name: value or 0 for name, value in totals.items()},
        "by_difficulty": {"before": {}, "after": {}, **by_difficulty},
    }


def print_summary(
    layout: RunLayout,
    summary: dict[str, Any],
    held_out: Mapping[str, EvaluationTable],
    *,
    model: str,
) -> None:
    """Show what the run did and what to type next."""
    said = (
        "{num_steps} steps in {seconds_training:.0f} s (first policy {seconds_first_policy:.0f} s, "
        "all {seconds_total:.0f} s); staleness mean {staleness_mean:.2f}, max {staleness_max}; "
        "masked {masked_fraction:.2%}; {tokens_per_second_generated:,.0f} tokens/s generated, "
        "{tokens_per_second_trained:,.0f} trained; overlap efficiency {overlap_efficiency:.2f}"
    )
    rates = [_rates(held_out["before"], held_out["after"])] if len(held_out) == 2 else []
    say(*rates, said.format_map(summary), *next_commands(layout, model))


def next_commands(layout: RunLayout, model: str) -> list[str]:
    """Return what a user may want to type after a run; `model` is what the commands call it."""
    run = f"{layout.root.parent.name}/{layout.name}"
    opened = f"import areal_flow; run = areal_flow.open_run('{run}')"
    rows = "run.trajectories(text=True, columns=['prompt', 'completion', 'reward']).tail()"
    read = f"{opened}; print({rows}.to_string(max_colwidth=30))"
    commands = {
        "areal-flow ui": "the MLflow UI: metrics and models",
        f'python -c "{read}"': "the last trajectories in pandas",
        f"areal-flow trajectories {layout.name}": "what the policy wrote; --show 1 for one in full",
        f"areal-flow lineage {model}": "what the model was made from",
        f"areal-flow evaluate {model}": "the model on its held-out prompts",
        f"areal-flow export {model} DIRECTORY": "a plain Hugging Face directory",
    }
    return ["", "Next:", *(f"  {command}\n      {what}" for command, what in commands.items())]


def _rates(before: EvaluationTable, after: EvaluationTable) -> Table:
    rows: list[dict[str, Any]] = [
        {
            "difficulty": difficulty,
            "prompts": rate.n,
            "before": f"{rate.pass_rate:.3f}",
            "after": f"{after.by_difficulty[difficulty][0].pass_rate:.3f}",
            "mean tokens": f"{length:.1f} -> {after.by_difficulty[difficulty][1]:.1f}",
        }
        for difficulty, (rate, length) in before.by_difficulty.items()
    ]
    overall = {"before": _interval(before.overall), "after": _interval(after.overall)}
    rows.append({"difficulty": "all", "prompts": before.overall.n, **overall, "mean tokens": ""})
    title = "Held-out prompts, one sample each, 95% intervals"
    return Table(rows, title)


def _interval(rate: PassRate) -> str:
    return f"{rate.pass_rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
