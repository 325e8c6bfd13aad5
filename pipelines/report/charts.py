"""Which charts a report has: rewards, pass rates, times, staleness, lengths, and each metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_flow.config import Recipe
from areal_flow.pass_rates import PASS_RATE
from areal_flow.store.ledger import STEPS
from areal_flow.types import EvaluationTable
from pipelines.report.svg import curves, histogram

_FIXED = {"loss": "Loss", "grad_norm": "Gradient norm", "learning_rate": "Learning rate"}
_TOGETHER = {
    "Throughput": (
        "Tokens that generators sampled, and tokens that the trainer gave a gradient, a second.",
        {
            "generated": "speed/generated_tokens_per_s",
            "trained": "speed/trained_tokens_per_s",
        },
    ),
    "Busy": (
        "The share of the time in which generators and trainer worked.",
        {
            "generators": "speed/generators_busy_fraction",
            "trainer": "speed/trainer_busy_fraction",
        },
    ),
    "Percentiles of length": (
        "Tokens that a tenth, a half and nine tenths of a step's completions have at most.",
        {f"p{share}": f"rollout/completion_p{share}_tokens" for share in (90, 50, 10)},
    ),
}
"""Charts of several metrics: what each means, and the metrics by what their lines are called."""
_BY_NAME = {
    "pass_rate/difficulty_": ("Pass rate by difficulty", "Of each step's batch."),
    "reward/": ("Rewards before their weights", "Means over each step's batch."),
}
"""Charts of all metrics whose names begin alike; a line is called by the rest of its name."""
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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """An evaluation on held-out prompts."""

    name: str
    version: int
    """The oldest policy version that answered."""
    found: EvaluationTable


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and what it shows."""

    title: str
    meaning: str
    svg: str


def make_charts(
    recipe: Recipe,
    database: Any,
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[HeldOut],
) -> list[Chart]:
    """Return the charts of a run that has trained.

    Args:
        database: the run's, as `Run.database` makes it.
        steps: rows of the ledger from step 1 on.
    """
    numbers = [row["step"] for row in steps]
    return [
        *_score_charts(steps, numbers, evaluations),
        _time_chart(steps, numbers, num_generators=recipe.cluster.num_generators),
        _staleness_chart(database, limit=recipe.controller.max_staleness),
        _length_chart(database, num_steps=len(steps)),
        *_metric_charts(steps, numbers),
    ]


def _score_charts(
    steps: Sequence[Mapping[str, Any]], numbers: Sequence[int], evaluations: Sequence[HeldOut]
) -> list[Chart]:
    scores = [(each.version, each.found.overall) for each in evaluations]
    rewards = [(at, s.reward.reward_mean, s.reward.low, s.reward.high) for at, s in scores]
    rates = [(at, s.passed.pass_rate, s.passed.low, s.passed.high) for at, s in scores]
    drawn = {
        "Mean reward": ("reward_mean", "What completions are worth", rewards),
        "Pass rate": (PASS_RATE, "How many completions pass", rates),
    }
    return [
        Chart(
            title,
            f"{meaning}: each step's batch, and held-out answers.",
            curves(
                {"trained": [row[column] for row in steps]},
                steps=numbers,
                label="",
                held_out=held_out,
            ),
        )
        for title, (column, meaning, held_out) in drawn.items()
    ]


def _time_chart(
    steps: Sequence[Mapping[str, Any]], numbers: Sequence[int], *, num_generators: int
) -> Chart:
    generating = [row["seconds_generate"] / num_generators for row in steps]
    training = [row["seconds_read"] + row["seconds_train"] + row["seconds_stage"] for row in steps]
    lines = {
        "step": [row["seconds_step"] for row in steps],
        "generating or training, the longer": [*map(max, generating, training)],
    }
    bound = "No schedule can be faster than the longer of generating and training."
    drawn = curves(lines, steps=numbers, label="seconds")
    return Chart("Time of a step, and its bound", bound, drawn)


def _staleness_chart(database: Any, *, limit: int) -> Chart:
    bars = {"tokens": dict(database.sql(_STALENESS).fetchall())}
    return Chart(
        "Staleness of trained trajectories' tokens",
        f"Versions between sampling and training; beyond {limit} a token is masked.",
        histogram(bars, xlabel="versions", ylabel="share", limit=limit),
    )


def _length_chart(database: Any, *, num_steps: int) -> Chart:
    bars: dict[str, Counter[int]] = {"first quarter": Counter(), "last quarter": Counter()}
    query = _LENGTHS.format(quarter=max(1, num_steps // 4), num_steps=num_steps)
    for is_early, length, count in database.sql(query).fetchall():
        bars["first quarter" if is_early else "last quarter"][length] += count
    meaning = "In the first and the last quarter of the steps."
    return Chart("Length of completions", meaning, histogram(bars, xlabel="tokens", ylabel="share"))


def _metric_charts(steps: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> list[Chart]:
    """Return the charts of what steps computed: together what belongs together, then the rest.

    Numbers that never change are left out.
    """
    metrics = set(steps[0]).difference(STEPS.names, [PASS_RATE])
    drawn = {
        title: (meaning, {_rest(name, area): name for name in _begin_with(area, metrics)})
        for area, (title, meaning) in _BY_NAME.items()
    } | _TOGETHER
    alone = metrics.difference(*(lines.values() for _, lines in drawn.values()))
    titles = {name: name.replace("_", " ").capitalize() for name in sorted(alone)}
    drawn |= {title: ("", {title: name}) for name, title in {**_FIXED, **titles}.items()}
    charts = []
    for title, (meaning, named) in drawn.items():
        lines = {label: [row.get(name) for row in steps] for label, name in named.items()}
        if any(len(set(values)) > 1 for values in lines.values()):
            charts.append(Chart(title, meaning, curves(lines, steps=numbers, label="")))
    return charts


def _rest(metric: str, area: str) -> str:
    return metric.removeprefix(area).removesuffix("_mean")


def _begin_with(area: str, metrics: Collection[str]) -> list[str]:
    """Return the metrics of an area, numbers in their names ascending."""
    return sorted((m for m in metrics if m.startswith(area)), key=lambda m: (len(m), m))
