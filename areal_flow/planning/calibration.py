"""Fits the shares that a machine reaches to a run of it, and says what error is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.step_metrics import SPEED_AREA
from areal_flow.planning.costs import Costs, Efficiencies
from areal_flow.planning.lengths import Lengths
from areal_flow.planning.planner import Job
from areal_flow.planning.simulator import Simulated, simulate
from areal_flow.rollout.engines.prefill import TOKENS_A_STEP

STALL = f"{SPEED_AREA}weights_stall_s_mean"
SKIPPED = 0.25
"""Of a run's steps: the first ones, until it is steady."""
FEWEST_STEPS = 8
MOST_STEPS = 48
"""Simulated, of a run that has more."""
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    efficiency: Efficiencies
    measured_step_s: float
    predicted_step_s: float
    measured_staleness: float
    predicted_staleness: float

    @property
    def sentence(self) -> str:
        error = self.predicted_step_s / self.measured_step_s - 1
        return (
            f"Calibrated: a step of that run took {self.measured_step_s:.3g} s, its plan has "
            f"{self.predicted_step_s:.3g} s ({error:+.0%}); staleness "
            f"{self.measured_staleness:.2f} and {self.predicted_staleness:.2f}"
        )


def steady(rows: Any) -> Any:
    """Return the last ones of a run's steps, or of its trajectories."""
    return rows[int(SKIPPED * len(rows)) :]


def simulate_steps(recipe: Recipe, costs: Costs, lengths: Lengths, number: int) -> Simulated:
    """Simulate as many steps as a run had, from its start, and measure those that are steady."""
    number = min(number, MOST_STEPS)
    steps = recipe.model_copy(update={"num_steps": number})
    return simulate(steps, costs, lengths, num_skipped=int(SKIPPED * number))


def calibrate(job: Job, steps: Sequence[Mapping[str, Any]], *, commit_s: float) -> Calibration:
    """Fit the share of training to the trainer's seconds, that of prefills to the time for which
    new weights stop a generator, and the time of a decode step to the generators' seconds for a
    token. What the controller makes of them is not fitted.

    Args:
        job: with the run's recipe and workers, and the GPU that each of these had.
        steps: rows of its ledger, without the genesis.
        commit_s: from the end of a group to its place in the log, scoring included.

    Raises:
        RunError: there are too few steps.
    """
    rows = steady(steps)
    if len(rows) < FEWEST_STEPS:
        raise RunError(f"expected {FEWEST_STEPS} steady steps to calibrate to, found {len(rows)}")

    def mean(*names: str) -> float:
        return sum(fmean(row[name] for row in rows) for name in names)

    recipe, lengths = job.recipe, job.lengths
    token_s = mean("seconds_generate") / mean("num_generated_tokens")
    training_s = mean("seconds_read", "seconds_train", "seconds_stage")
    efficiency = Efficiencies(
        training=1.0,
        prefill=1.0,
        trajectory_s=0.0,
        reward_s=0.0,
        publish_s=max(0.0, mean("seconds_step") - mean("seconds_wait") - training_s),
        commit_s=commit_s,
    )
    at_peak = replace(job, efficiency=efficiency).costs(recipe)
    training = prefill = at_peak.mean_train_s(recipe.controller.batch_size, lengths) / training_s
    if stalls := [row[STALL] for row in rows if isinstance(row.get(STALL), float)]:
        # No more than these are computed before the next token, and some decode time is in it, too.
        tokens = min(TOKENS_A_STEP, at_peak.max_rows * lengths.decoding_tokens)
        prefill = max(training, tokens * at_peak.prefill_token_s / fmean(stalls))
    efficiency = replace(efficiency, training=training, prefill=prefill)
    low, high = 0.0, token_s * recipe.generation.max_num_seqs
    for _ in range(ROUNDS):
        efficiency = replace(efficiency, decode_step_s=(low + high) / 2)
        costs = replace(job, efficiency=efficiency).costs(recipe)
        simulated = simulate_steps(recipe, costs, lengths, len(steps))
        busy_s = simulated.generators_busy * recipe.cluster.num_generators
        too_slow = busy_s / simulated.generated_tokens_per_s > token_s
        low, high = (
            (low, efficiency.decode_step_s) if too_slow else (efficiency.decode_step_s, high)
        )
    return Calibration(
        efficiency,
        mean("seconds_step"),
        simulated.step_s,
        mean("staleness_mean"),
        simulated.staleness_mean,
    )
