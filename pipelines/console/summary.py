"""The summary of a finished run: numbers for `summary.json`, a table, and suggested commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from rich.console import RenderableType

from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import EvaluationTable
from areal_flow.core.program import command, from_here, python
from pipelines.console.run_log import say
from pipelines.console.tables import Table, samples_text, with_interval

_TOTALS = """
SELECT
    (SELECT train_s FROM ledger WHERE step = 0) AS first_policy_s,
    sum(step_s) AS training_s,
    count(*) AS num_steps,
    sum(staleness_mean * num_trained_tokens) / nullif(sum(num_trained_tokens), 0) AS staleness_mean,
    max(staleness_max) AS staleness_max,
    sum(num_stale_tokens) / nullif(sum(num_trained_tokens + num_stale_tokens), 0)
        AS masked_fraction,
    sum(num_discarded_tokens)::BIGINT AS num_discarded_tokens,
    sum(num_failed_members)::BIGINT AS num_failed_members,
    sum(num_generated_tokens) / nullif(training_s, 0) AS tokens_per_second_generated,
    sum(num_trained_tokens) / nullif(training_s, 0) AS tokens_per_second_trained,
    greatest(
        sum(generate_s) / $num_generators,
        sum(read_s + train_s + stage_s)
    ) AS longer_phase_s,
    longer_phase_s / nullif(greatest(longer_phase_s, training_s), 0)
        AS overlap_efficiency
FROM (
    SELECT *,
        (num_trained_tokens + num_masked_tokens) * coalesce(masked_stale_fraction, 0)
            AS num_stale_tokens
    FROM ledger
)
WHERE step > 0
"""
"""Masked tokens are those too old; the environment's tokens count as neither masked nor trained.
Overlap efficiency is max(T_gen, T_train) / T_step: 1 when the longer phase hides the other."""

_STALE = "masked_stale_fraction"
SUMMARY_COLUMNS = [
    *("step", "metrics", "verifier", "staleness_mean", "staleness_max", "num_failed_members"),
    *("num_generated_tokens", "num_trained_tokens", "num_masked_tokens", "num_discarded_tokens"),
    *("step_s", "generate_s", "read_s", "train_s", "stage_s"),
]
"""What is read of a ledger row."""

_VERIFIERS = """
SELECT verifier, min(step) AS first_step, max(step) AS last_step FROM ledger
GROUP BY verifier ORDER BY first_step
"""


def summarise(
    held_out: Mapping[str, EvaluationTable], ledger: pa.Table, *, num_generators: int
) -> dict[str, Any]:
    """Summarise a whole run.

    Args:
        held_out: evaluations by name; those "before" and "after" are summarised.
        ledger: `SUMMARY_COLUMNS` of every row, the genesis too.
    """
    from areal_flow.log.database import empty_database
    from areal_flow.log.ledger import flatten_metrics

    ledger = flatten_metrics(ledger)
    if _STALE not in ledger.column_names:  # a run without steps
        ledger = ledger.append_column(_STALE, pa.nulls(len(ledger), pa.float64()))
    with empty_database() as connection:
        connection.register("ledger", ledger)
        relation = connection.sql(_TOTALS, params={"num_generators": num_generators})
        (totals,) = relation.project("* EXCLUDE longer_phase_s").to_arrow_table().to_pylist()
        verifiers = connection.sql(_VERIFIERS).to_arrow_table().to_pylist()
    compared = {name: held_out[name] for name in ("before", "after") if name in held_out}

    def by(part: str) -> dict[str, dict[str, Any]]:
        return {"before": {}, "after": {}} | {
            name: {str(key): scores.as_json() for key, scores in getattr(table, part).items()}
            for name, table in compared.items()
        }

    return {
        "verifiers": verifiers,
        **dict.fromkeys(("held_out_before", "held_out_after")),
        **{f"held_out_{name}": table.overall.as_json() for name, table in compared.items()},
        **{name: value or 0 for name, value in totals.items()},
        "by_difficulty": by("by_difficulty"),
        "by_set": by("by_set"),
    }


def print_summary(
    layout: RunLayout,
    summary: dict[str, Any],
    held_out: Mapping[str, EvaluationTable],
    *,
    model: str,
) -> None:
    text = (
        "{num_steps} steps in {training_s:.0f} s ({fine_tuning}all "
        "{total_s:.0f} s); staleness mean {staleness_mean:.2f}, max {staleness_max}; "
        "masked {masked_fraction:.2%}; {tokens_per_second_generated:,.0f} tokens/s generated, "
        "{tokens_per_second_trained:,.0f} trained; overlap efficiency {overlap_efficiency:.2f}"
    )
    seconds = f"fine-tuning {summary['first_policy_s']:.0f} s, "
    stages = {"fine_tuning": seconds if layout.sft_rows.is_file() else ""}
    both = {"before", "after"} <= held_out.keys()
    compared = _comparison(held_out["before"], held_out["after"]) if both else []
    notes = _changes(summary["verifiers"])
    if num_failed := summary["num_failed_members"]:
        listing = ("trajectories", layout.name, "--where", "reward IS NULL")
        notes.append(
            f"{num_failed} trajectories have no reward, since the workflow or the verifier failed: "
            + command(*listing, runs=layout.root.parent)
        )
    text = text.format(**summary, **stages)
    say(*compared, text, *notes, *next_commands(layout, model, evaluated=bool(held_out)))


def _changes(verifiers: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(verifiers) < 2:
        return []
    heading = "The verifier changed, and nothing is compared across it:"
    listed = (
        f"  steps {row['first_step']} to {row['last_step']}: {row['verifier']}" for row in verifiers
    )
    return [heading, *listed]


def next_commands(layout: RunLayout, model: str, *, evaluated: bool) -> list[str]:
    """Return the commands that a user may want to type after a run.

    Args:
        model: the reference to its policy in these commands.
        evaluated: whether the run has held-out prompts.
    """
    runs = layout.root.parent
    path = json.dumps(str(from_here(layout.root)))
    open_run = f"import areal_flow; run = areal_flow.open_run({path})"
    rows = 'run.trajectories(text=True, columns=["prompt", "completion", "reward"]).tail()'
    print_rows = f"{open_run}; print({rows}.astype(object).to_string(max_colwidth=30))"
    suggestions = {
        ("ui",): "the MLflow UI: metrics and models",
        ("trajectories", layout.name): "what the policy wrote; --show 1 for one in full",
        ("lineage", model): "what the model was made from",
        ("evaluate", model): "the model on its held-out prompts",
        ("export", model, "DIRECTORY"): "a plain Hugging Face directory",
    }
    if not (runs / "mlflow.db").is_file():
        del suggestions[("ui",)]
    if not evaluated:
        del suggestions["evaluate", model]
    commands = {command(*words, runs=runs): what for words, what in suggestions.items()}
    commands[python(print_rows)] = "the last trajectories in pandas"
    return ["", "Next:", *(f"  {command}\n      {what}" for command, what in commands.items())]


def _comparison(before: EvaluationTable, after: EvaluationTable) -> list[RenderableType]:
    (label, first_parts), (_, last_parts) = before.parts, after.parts
    both = [(part, scores, last_parts[part]) for part, scores in first_parts.items()]
    parts = both if len(both) > 1 else []
    rows = [
        {
            label: part,
            "prompts": first.passed.n,
            "pass rate": f"{first.passed.pass_rate:.3f} -> {last.passed.pass_rate:.3f}",
            "mean reward": f"{first.reward.reward_mean:.3f} -> {last.reward.reward_mean:.3f}",
            "mean tokens": f"{first.mean_tokens:.1f} -> {last.mean_tokens:.1f}",
        }
        for part, first, last in [*parts, ("all", before.overall, after.overall)]
    ]
    kind = "Wilson" if after.overall.num_samples == 1 else "normal"
    changes = [
        f"{label} {with_interval(before.overall, name)} -> {with_interval(after.overall, name)}"
        f" (95%, {kind})"
        for label, name, kind in (
            ("pass rate  ", "pass_rate", kind),
            ("mean reward", "reward_mean", "normal"),
        )
    ]
    return [Table(rows, f"Held-out prompts, {samples_text(after.overall)}"), "", *changes, ""]
