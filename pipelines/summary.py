"""Summarises a finished run: numbers for `summary.json`, a table, and the next commands to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from areal_flow.layout import RunLayout
from areal_flow.types import EvaluationTable, PassRate
from pipelines.cli.tables import make_console, print_table


def summarise(
    held_out: Mapping[str, EvaluationTable],
    ledger: Sequence[dict[str, Any]],
    *,
    num_generators: int,
    seconds_total: float,
    model_version: str | None,
) -> dict[str, Any]:
    """Return the summary of a whole run.

    Args:
        held_out: the evaluations "before" and "after", as far as there are any.
        ledger: every row, the genesis first.
    """
    genesis, *steps = ledger
    num_trained = _sum(steps, "num_trained_tokens")
    num_masked = _sum(steps, "num_masked_tokens")
    seconds = _sum(steps, "seconds_step")
    weighted = sum(row["staleness_mean"] * row["num_trained_tokens"] for row in steps)
    return {
        "held_out_before": _rate(held_out.get("before")),
        "held_out_after": _rate(held_out.get("after")),
        "seconds_first_policy": genesis["seconds_train"],
        "seconds_training": seconds,
        "seconds_total": seconds_total,
        "num_steps": len(steps),
        "staleness_mean": weighted / num_trained if num_trained else 0.0,
        "staleness_max": max((row["staleness_max"] for row in steps), default=0),
        "masked_fraction": num_masked / max(1, num_trained + num_masked),
        "num_discarded_tokens": _sum(steps, "num_discarded_tokens"),
        "tokens_per_second_generated": _sum(steps, "num_generated_tokens") / max(1e-9, seconds),
        "tokens_per_second_trained": num_trained / max(1e-9, seconds),
        "overlap_efficiency": overlap_efficiency(steps, num_generators=num_generators),
        "model_version": model_version,
        "by_difficulty": {
            "before": _by_difficulty(held_out.get("before")),
            "after": _by_difficulty(held_out.get("after")),
        },
    }


def overlap_efficiency(steps: Sequence[dict[str, Any]], *, num_generators: int) -> float:
    """Return max(T_gen, T_train) / T_step: 1 when the longer phase hides the other completely."""
    generating = _sum(steps, "seconds_generate") / num_generators
    training = (
        _sum(steps, "seconds_read") + _sum(steps, "seconds_train") + _sum(steps, "seconds_stage")
    )
    seconds = _sum(steps, "seconds_step")
    return min(1.0, max(generating, training) / seconds) if seconds else 0.0


def print_summary(
    layout: RunLayout,
    summary: dict[str, Any],
    held_out: Mapping[str, EvaluationTable],
    *,
    model: str,
) -> None:
    """Show what the run did and what to type next."""
    console = make_console()
    if len(held_out) == 2:
        _print_rates(console, held_out["before"], held_out["after"])
    seconds = f"{summary['seconds_first_policy']:.0f} s"
    fine_tuned = f"fine-tuning {seconds}, " if layout.sft_rows.is_file() else ""
    console.print(
        f"{summary['num_steps']} steps in {summary['seconds_training']:.0f} s "
        f"({fine_tuned}all {summary['seconds_total']:.0f} s); "
        f"staleness mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}; masked "
        f"{summary['masked_fraction']:.2%}; {summary['tokens_per_second_generated']:,.0f} tokens/s "
        f"generated, {summary['tokens_per_second_trained']:,.0f} trained; overlap efficiency "
        f"{summary['overlap_efficiency']:.2f}",
        soft_wrap=True,
    )
    console.print("\n".join(next_commands(layout, model)), soft_wrap=True)


def next_commands(layout: RunLayout, model: str) -> list[str]:
    """Return what a user may want to type after a run; `model` is what the commands call it."""
    run = f"{layout.root.parent.name}/{layout.name}"
    read = f"import areal_flow; print(areal_flow.open_run('{run}').trajectories().tail())"
    commands = {
        "areal-flow ui": "the MLflow UI: metrics and models",
        f'python -c "{read}"': "the trajectories in pandas",
        f"areal-flow trajectories {layout.name}": "what the policy wrote; --show 1 for one in full",
        f"areal-flow lineage {model}": "what the model was made from",
        f"areal-flow evaluate {model}": "the model on its held-out prompts",
        f"areal-flow export {model} DIRECTORY": "a plain Hugging Face directory",
    }
    return ["", "Next:", *(f"  {command}\n      {what}" for command, what in commands.items())]


def _print_rates(console: Console, before: EvaluationTable, after: EvaluationTable) -> None:
    rows: list[tuple[str, ...]] = []
    for difficulty, (rate, length) in before.by_difficulty.items():
        rate_after, length_after = after.by_difficulty[difficulty]
        lengths = f"{length:.1f} -> {length_after:.1f}"
        rates = f"{rate.pass_rate:.3f}", f"{rate_after.pass_rate:.3f}"
        rows.append((str(difficulty), str(rate.n), *rates, lengths))
    overall = before.overall, after.overall
    rows.append(("all", str(before.overall.n), *map(_interval, overall), ""))
    labels = ("difficulty", "prompts", "before", "after", "mean tokens")
    title = "Held-out prompts, one sample each, 95% intervals"
    print_table(console, labels, rows, title=title)


def _interval(rate: PassRate) -> str:
    return f"{rate.pass_rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]"


def _rate(table: EvaluationTable | None) -> dict[str, Any] | None:
    return asdict(table.overall) if table else None


def _by_difficulty(table: EvaluationTable | None) -> dict[str, Any]:
    if table is None:
        return {}
    return {
        str(difficulty): {"pass_rate": rate.pass_rate, "n": rate.n, "mean_tokens": length}
        for difficulty, (rate, length) in table.by_difficulty.items()
    }


def _sum(steps: Sequence[dict[str, Any]], column: str) -> float:
    return float(sum(row[column] for row in steps))
