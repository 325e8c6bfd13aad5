"""Which charts a report has: the six that matter first, then all other metrics that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_flow.evaluation.pass_rates import PASS_RATE
from areal_flow.evaluation.scores import EvaluationTable
from areal_flow.store.ledger import STEPS
from pipelines.report.svg import Interval, curves

Evaluation = tuple[int, EvaluationTable]
"""The oldest policy version that answered, and what its answers were worth."""
_NUM_FIRST = 6
_SCORES = "Of each step's batch, and of held-out answers."
_LINES: dict[str, tuple[str, dict[str, str]]] = {
    "Pass rate": (_SCORES, {"batch": PASS_RATE}),
    "Mean reward": (_SCORES, {"batch": "reward_mean"}),
    "Entropy": ("Of trained tokens, in nats.", {"entropy": "entropy_mean"}),
    "Staleness": (
        "Of trained tokens: versions between sampling and training.",
        {"mean": "staleness_mean", "max": "staleness_max"},
    ),
    "Length of completions": (
        "Tokens that 90%, 50% and 10% of a step's completions have at most.",
        {f"p{share}": f"rollout/completion_p{share}_tokens" for share in (90, 50, 10)},
    ),
    "Time of a step": ("Seconds.", {"step": "seconds_step"}),
    "Throughput": (
        "Tokens a second that were sampled, and that got a gradient.",
        {"generated": "speed/generated_tokens_per_s", "trained": "speed/trained_tokens_per_s"},
    ),
    "Busy": (
        "The share of the time in which generators and trainer worked.",
        {"generators": "speed/generators_busy_fraction", "trainer": "speed/trainer_busy_fraction"},
    ),
}
"""Charts by their worth: what each means, and columns by what their lines are called."""
_BY_NAME = {
    "pass_rate/difficulty_": ("Pass rate by difficulty", "Of each step's batch."),
    "reward/": ("Rewards before their weights", "Means over each step's batch."),
}
"""Charts of all metrics whose names begin alike; a line is called by the rest of its name."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and what it shows."""

    title: str
    meaning: str
    svg: str


def make_charts(
    steps: Sequence[Mapping[str, Any]], evaluations: Iterable[Evaluation]
) -> tuple[list[Chart], list[Chart]]:
    """Return the six charts that matter most of a run that has trained, and all others.

    Numbers that never change are left out, and those that another chart has drawn.

    Args:
        steps: rows of the ledger, from step 1 on.
    """
    held_out: dict[str, list[Interval]] = {"Pass rate": [], "Mean reward": []}
    for at, found in evaluations:
        passed, reward = found.overall.passed, found.overall.reward
        held_out["Pass rate"].append((at, passed.pass_rate, passed.low, passed.high))
        held_out["Mean reward"].append((at, reward.reward_mean, reward.low, reward.high))
    charts, drawn = [], []
    for title, (meaning, named) in {**_LINES, **_other_lines(set(steps[0]))}.items():
        lines = {label: [row.get(name) for row in steps] for label, name in named.items()}
        intervals = held_out.get(title, [])
        shown = [*lines.values()], [value[:2] for value in intervals]
        changes = intervals or any(len(set(values)) > 1 for values in lines.values())
        if shown not in drawn and (changes or (title == "Pass rate" and len(steps) > 1)):
            drawn.append(shown)
            numbers = [row["step"] for row in steps]
            charts.append(Chart(title, meaning, curves(lines, numbers, intervals)))
    first = [chart for chart in charts if chart.title in _LINES][:_NUM_FIRST]
    return first, [chart for chart in charts if chart not in first]


def _other_lines(columns: set[str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the charts of metrics that no other chart has: some together, the rest alone."""
    metrics = columns.difference(STEPS.names) | {"loss", "grad_norm", "learning_rate"}
    found = {}
    for area, (title, meaning) in _BY_NAME.items():
        names = sorted((m for m in metrics if m.startswith(area)), key=lambda m: (len(m), m))
        lines = {name.removeprefix(area).removesuffix("_mean"): name for name in names}
        found[title] = meaning, lines
    drawn = {name for _, lines in [*_LINES.values(), *found.values()] for name in lines.values()}
    alone = {name if "/" in name else f"train/{name}": name for name in sorted(metrics - drawn)}
    return {**found, **{title: ("", {title: name}) for title, name in sorted(alone.items())}}
