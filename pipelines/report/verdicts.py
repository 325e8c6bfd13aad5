"""Whether a run is healthy: a verdict in words on each thing that a researcher asks first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from areal_flow.config import Recipe
from areal_flow.core.pass_rates import PASS_RATE, PassRate, wilson_interval
from areal_flow.core.step_metrics import ENGINE_GAP
from areal_flow.flow.bottleneck import find_bottleneck
from areal_flow.flow.engine_gap import REMEDIES, is_wide

WINDOW_STEPS = 8
"""A value at the start or now is the mean over so many steps: that of one step is mostly noise."""
LEAST_ENTROPY = 0.1
"""Of the first entropy; with less, nearly all completions of a prompt are the same."""
MOST_ENTROPY = 2.0
"""Of the first entropy; a policy that learns becomes more certain, so twice as much is odd."""
MOST_EQUAL_GROUPS = 0.5
"""Of all groups; nothing is learned from a group whose rewards are all equal."""
MOST_MASKED = 0.1
"""Of all tokens; what is too old to train was generated for nothing."""
MOST_TRUNCATED = 0.1
"""Of all completions; one that has no end is judged wrong, whatever it would have said."""
MOST_FAILED = 0.05
"""Of all completions; about one in each group of 16, so that every group lacks one."""

Mark = Literal["good", "look", "bad", "open"]
Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Verdict:
    subject: str
    mark: Mark
    text: str
    detail: str


def judge_run(
    recipe: Recipe, steps: Steps, totals: Mapping[str, Any], held_out: Sequence[PassRate]
) -> list[Verdict]:
    """Return the verdicts on a run that has trained.

    Rewards are compared over the steps that the last verifier scored.

    Args:
        steps: rows of the ledger from step 1 on.
        totals: of the run, as `summarise` returns them.
        held_out: the pass rates of the evaluations; with fewer than two, batches are compared.
    """
    alike = [row for row in steps if row.get("verifier") == steps[-1].get("verifier")]
    of, rates = "Held-out pass rate", held_out
    if len(held_out) < 2:
        of, rates = "Pass rate of batches", batch_pass_rates(recipe, alike)
    equal_groups = mean_of(alike, "rollout/zero_variance_groups_fraction") or 0.0
    verdicts = [judge_pass_rate(rates, of=of, equal_groups=equal_groups)] if rates else []
    first, last = ends(steps, "entropy_mean")
    if first is not None and last is not None:
        verdicts.append(judge_entropy(first, last))
    if any(row.get("seconds_step") for row in steps):
        text, remedy = find_bottleneck(steps, num_generators=recipe.cluster.num_generators)
        verdicts.append(Verdict("Speed", "look" if remedy else "good", text, remedy))
    mean, limit = totals["staleness_mean"], recipe.controller.max_staleness
    return [
        *verdicts,
        *judge_engine_gap(steps),
        judge_staleness(mean, limit, masked=totals["masked_fraction"]),
        judge_failures(
            totals["num_failed_members"] / (len(steps) * recipe.controller.batch_size),
            truncated=ends(steps, "rollout/truncated_fraction")[1] or 0.0,
            skipped=mean_of(steps, "skipped_updates_fraction") or 0.0,
        ),
    ]


def judge_pass_rate(rates: Sequence[PassRate], *, of: str, equal_groups: float) -> Verdict:
    first, last = rates[0], rates[-1]
    moved = f"from {first.pass_rate:.2f} to {last.pass_rate:.2f}"
    mark: Mark = "open"
    text = f"{of} went {moved}: no clear difference"
    if last.low > first.high:
        mark, text = "good", f"{of} rose {moved}"
    elif last.high < first.low:
        mark, text = "bad", f"{of} fell {moved}"
    detail = f"95%: {first.low:.3f} to {first.high:.3f}, then {last.low:.3f} to {last.high:.3f}"
    if equal_groups > MOST_EQUAL_GROUPS:
        mark = "look" if mark == "open" else mark
        detail += f"; {equal_groups:.0%} of groups taught nothing: their rewards were equal"
    return Verdict("Pass rate", mark, text, detail)


def judge_entropy(first: float, last: float) -> Verdict:
    verb = "rose" if last > first else "fell"
    moved = f"{verb} from {first:.2f} to" if f"{first:.2f}" != f"{last:.2f}" else "stayed at"
    mark: Mark = "good"
    meaning = "still exploring"
    if last < LEAST_ENTROPY * first:
        mark, meaning = "bad", "the policy stopped exploring"
    elif last > MOST_ENTROPY * first:
        mark, meaning = "look", "the policy may forget what it could"
    return Verdict("Entropy", mark, f"Entropy {moved} {last:.2f}: {meaning}", "nats a token")


def judge_staleness(mean: float, limit: int, *, masked: float) -> Verdict:
    detail = f"{masked:.1%} of tokens were too old to train"
    mark: Mark = "look" if masked > MOST_MASKED else "good"
    return Verdict("Staleness", mark, f"Mean staleness {mean:.1f} of at most {limit}", detail)


def judge_engine_gap(steps: Steps) -> list[Verdict]:
    """Return a verdict on engine and trainer, if the engine's version was ever the trainer's."""
    difference = mean_of(steps, f"{ENGINE_GAP}logprob_difference_mean")
    if difference is None:
        return []
    mark: Mark = "good"
    text = f"Engine and trainer differ by {difference:.2g} nats a token with the same weights"
    kl = mean_of(steps, f"{ENGINE_GAP}kl") or 0.0
    measured = [row for row in steps if row.get(f"{ENGINE_GAP}tokens")]
    detail = f"KL divergence {kl:.2g} nats a token; {len(measured)} of {len(steps)} steps had "
    detail += "tokens of the policy before the step"
    if wide := sum(map(is_wide, steps)):
        mark = "bad" if is_wide(measured[-1]) else "look"
        text, detail = (
            f"{text}: too much in {wide} of {len(measured)} steps",
            f"{detail}; {REMEDIES}",
        )
    return [Verdict("Engine", mark, text, detail)]


def judge_failures(failed: float, *, truncated: float, skipped: float) -> Verdict:
    mark: Mark = "look" if failed or truncated > MOST_TRUNCATED else "good"
    mark = "bad" if failed > MOST_FAILED or skipped else mark
    text = f"{failed:.1%} of completions failed" if failed else "No completion failed"
    updates = f"{skipped:.1%} of updates were skipped" if skipped else "no update was skipped"
    detail = f"{truncated:.1%} are cut at the length limit; {updates}"
    return Verdict("Failures", mark, text, detail)


def batch_pass_rates(recipe: Recipe, steps: Steps) -> list[PassRate]:
    """Return the pass rates of the first and the last steps, with intervals over their prompts."""
    n = recipe.groups_per_step * _window(steps)
    rates = ends(steps, PASS_RATE)
    return [wilson_interval(round(rate * n), n) for rate in rates if rate is not None]


def ends(steps: Steps, name: str) -> tuple[float | None, float | None]:
    return mean_of(steps[: _window(steps)], name), mean_of(steps[-_window(steps) :], name)


def mean_of(steps: Steps, name: str) -> float | None:
    known = [row[name] for row in steps if row.get(name) is not None]
    return fmean(known) if known else None


def _window(steps: Steps) -> int:
    return max(1, min(WINDOW_STEPS, len(steps) // 2))
