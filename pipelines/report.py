"""One HTML page about a run: what it did, how fast, what the policy wrote, what went wrong.

The page is made from the run's datasets, also while the run goes on, and loads nothing from
anywhere: charts are SVG within it. Completions are escaped, since a policy may write anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from areal_flow.config import load_recipe
from areal_flow.durable import replace_file
from areal_flow.evaluation.intervals import wilson_interval
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import leases
from areal_flow.recovery.run_directory import observed_state
from areal_flow.store.ledger import STEPS
from areal_flow.store.queries import Run
from areal_flow.types import PassRate
from pipelines import report_charts as charts
from pipelines.summary import overlap_efficiency

SAMPLES_PER_DIFFICULTY = 2
MOST_DIFFICULTIES = 8
_FIXED = {*STEPS.names}

_RATES = """
SELECT policy_version, count(*) FILTER (reward > 0) AS num_passed, count(*) AS n
FROM evaluations GROUP BY policy_version ORDER BY policy_version
"""
_STALENESS = """
SELECT policy_version - span.version AS staleness, sum(span.num_chosen)::BIGINT AS num_tokens
FROM (
    SELECT policy_version, unnest(chosen_spans(version_spans, loss_mask)) AS span
    FROM trajectories WHERE status = 'trained'
)
GROUP BY staleness ORDER BY staleness
"""
_LENGTHS = """
SELECT step <= {quarter} AS is_early, num_tokens, count(*)
FROM trajectories
WHERE status = 'trained' AND (step <= {quarter} OR step > {num_steps} - {quarter})
GROUP BY ALL ORDER BY ALL
"""
_DISCARDS = """
SELECT reason, count(*) FROM trajectories WHERE status = 'discarded' GROUP BY reason ORDER BY reason
"""
_HELD_OUT_SAMPLES = """
SELECT first.difficulty, first.prompt, first.answer,
       first.completion AS before, first.reward AS reward_before,
       last.completion AS after, last.reward AS reward_after
FROM evaluations AS first JOIN evaluations AS last USING (prompt_id)
WHERE first.evaluation = 'before' AND last.evaluation = 'after'
QUALIFY row_number() OVER (PARTITION BY first.difficulty ORDER BY hash(prompt_id)) <= {samples}
    AND dense_rank() OVER (ORDER BY first.difficulty) <= {difficulties}
ORDER BY first.difficulty, hash(prompt_id)
"""
_TRAINED_SAMPLES = """
SELECT step, prompt, completion, reward FROM trajectories
WHERE trajectory_id IN (
    SELECT trajectory_id FROM consumption WHERE step IN (1, {num_steps})
    QUALIFY row_number() OVER (PARTITION BY step ORDER BY hash(trajectory_id)) <= 4
)
ORDER BY step, trajectory_id
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and what it shows."""

    title: str
    meaning: str
    svg: str


def write_report(layout: RunLayout, path: Path | None = None) -> Path:
    """Write the page of a run; return where it lies: by default `report.html` in the run.

    Raises:
        RunError: there is no run.
    """
    target = path or layout.report
    replace_file(target, report_page(Run(layout.root)))
    return target


def report_page(run: Run) -> str:
    """Return the page of a run as HTML."""
    layout = run.layout
    recipe = load_recipe(layout.config)
    steps = run.steps("arrow").to_pylist()
    trained = [row for row in steps if row["step"] > 0]
    with closing(run.database()) as database:
        rates = _rates(database) if layout.evaluations.is_dir() else {}
        return render(
            run=layout.name,
            state=observed_state(layout),
            model=recipe.model,
            verifiers=[reward.verifier for reward in recipe.rewards],
            recipe=layout.config.read_text(),
            figures=_figures(run, trained, rates),
            charts=_charts(run, database, trained, rates) if trained else [],
            samples=_rows(database, _HELD_OUT_SAMPLES) if len(rates) > 1 else [],
            trained_samples=_rows(database, _TRAINED_SAMPLES, num_steps=len(trained)),
            events=_events(layout, steps, dict(database.sql(_DISCARDS).fetchall())),
        )


def render(**content: Any) -> str:
    """Return the page with everything escaped but the charts."""
    environment = Environment(
        loader=PackageLoader("pipelines"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made_at = datetime.now(UTC).astimezone()
    return environment.get_template("report.html").render(made_at=made_at, **content)


def _rows(database: Any, query: str, **values: int) -> list[dict[str, Any]]:
    limits = {"samples": SAMPLES_PER_DIFFICULTY, "difficulties": MOST_DIFFICULTIES}
    found = database.sql(query.format(**limits, **values)).to_arrow_table()
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def _rates(database: Any) -> dict[int, PassRate]:
    """Return the held-out pass rate of each policy version that was evaluated."""
    found = database.sql(_RATES).fetchall()
    return {version: wilson_interval(num_passed, n) for version, num_passed, n in found}


def _figures(
    run: Run, steps: Sequence[dict[str, Any]], rates: Mapping[int, PassRate]
) -> dict[str, str]:
    """Return the numbers that stand first, by what they are called."""
    seconds = sum(row["seconds_step"] for row in steps)
    num_trained = sum(row["num_trained_tokens"] for row in steps)
    num_masked = sum(row["num_masked_tokens"] for row in steps)
    num_generators = load_recipe(run.layout.config).cluster.num_generators
    named = {"Held-out pass rate before": min, "Held-out pass rate after": max}
    figures = {
        name: f"{rate.pass_rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
        for name, which in (named.items() if len(rates) > 1 else ())
        for rate in (rates[which(rates)],)
    }
    return figures | {
        "Training steps": f"{len(steps):,} in {_duration(seconds)}",
        "Trained tokens": f"{num_trained:,}, {num_trained / max(1e-9, seconds):,.0f} a second",
        "Masked tokens": f"{num_masked / max(1, num_trained + num_masked):.2%}",
        "Overlap efficiency": f"{overlap_efficiency(steps, num_generators=num_generators):.2f}",
    }


def _charts(
    run: Run,
    database: Any,
    steps: Sequence[dict[str, Any]],
    rates: Mapping[int, PassRate],
) -> list[Chart]:
    recipe = load_recipe(run.layout.config)
    numbers = [row["step"] for row in steps]

    def column(name: str) -> list[Any]:
        return [row[name] for row in steps]

    generating = [row["seconds_generate"] / recipe.cluster.num_generators for row in steps]
    training = [row["seconds_read"] + row["seconds_train"] + row["seconds_stage"] for row in steps]
    bound = [max(pair) for pair in zip(generating, training, strict=True)]
    quarter = max(1, len(steps) // 4)
    lengths: dict[str, Counter[int]] = {"first quarter": Counter(), "last quarter": Counter()}
    query = _LENGTHS.format(quarter=quarter, num_steps=len(steps))
    for is_early, length, count in database.sql(query).fetchall():
        lengths["first quarter" if is_early else "last quarter"][length] += count
    staleness = {"tokens": dict(database.sql(_STALENESS).fetchall())}
    bound_of = recipe.controller.max_staleness
    return [
        Chart(
            "Reward",
            "Mean reward of each step's batch, and the pass rate on prompts never trained on.",
            charts.curves(
                {"mean reward": column("reward_mean")}, steps=numbers, label="", held_out=rates
            ),
        ),
        Chart(
            "Time of a step, and its bound",
            "No schedule can be faster than the longer of generating and training.",
            charts.curves(
                {"step": column("seconds_step"), "generating or training, the longer": bound},
                steps=numbers,
                label="seconds",
            ),
        ),
        Chart(
            "Throughput",
            "Tokens that generators sampled, and tokens that the trainer gave a gradient.",
            charts.curves(
                {
                    name: [row[of] / max(1e-9, row["seconds_step"]) for row in steps]
                    for name, of in {
                        "generated": "num_generated_tokens",
                        "trained": "num_trained_tokens",
                    }.items()
                },
                steps=numbers,
                label="tokens a second",
            ),
        ),
        Chart(
            "Staleness of trained trajectories' tokens",
            f"Versions between sampling and training; beyond {bound_of} a token is masked.",
            charts.histogram(staleness, xlabel="versions", ylabel="share", limit=bound_of),
        ),
        Chart(
            "Length of completions",
            "In the first and the last quarter of the steps.",
            charts.histogram(lengths, xlabel="tokens", ylabel="share"),
        ),
        *_metric_charts(steps, numbers),
    ]


def _metric_charts(steps: Sequence[dict[str, Any]], numbers: Sequence[int]) -> list[Chart]:
    """Return a chart of each number that the algorithm computes besides, and of loss and norm."""
    fixed = {"loss": "Loss", "grad_norm": "Gradient norm", "learning_rate": "Learning rate"}
    computed = {
        name: name.replace("_", " ").capitalize() for name in sorted(set(steps[0]) - _FIXED)
    }
    series = {name: [row[of] for row in steps] for of, name in {**fixed, **computed}.items()}
    return [
        Chart(name, "", charts.curves({name: values}, steps=numbers, label=""))
        for name, values in series.items()
        if len(set(values)) > 1
    ]


def _events(
    layout: RunLayout, steps: Sequence[dict[str, Any]], discards: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return what went wrong and what was done about it: when or where, and what."""
    events = [
        (
            _local(lease.since),
            f"driver {lease.writer_epoch} began: process {lease.pid} on {lease.host}",
        )
        for lease in leases(layout.writers)
    ]
    for row in steps:
        if row["failed_submissions"]:
            given_up = ", ".join(map(str, row["failed_submissions"]))
            events.append((f"step {row['step']}", f"groups given up: {given_up}"))
    if failed := sum(row["num_failed_members"] for row in steps):
        events.append(("all steps", f"{failed:,} completions that no verifier scored"))
    events += [
        ("all steps", f"{count:,} trajectories discarded: {why}") for why, count in discards.items()
    ]
    if layout.forks.is_file():
        for fork in map(json.loads, layout.forks.read_text().splitlines()):
            at = _local(fork["at"])
            events.append((at, f"step {fork['step']} was replayed to another policy"))
    return events


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
