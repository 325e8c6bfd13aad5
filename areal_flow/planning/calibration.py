"""Fits the shares that a machine reaches to a run of it, and says what error is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_flow.config import Recipe
from areal_flow.errors import RunError
from areal_flow.planning.cards import Card
from areal_flow.planning.costs import Efficiencies, Policy, costs_of
from areal_flow.planning.lengths import Lengths
from areal_flow.planning.planner import simulated_run

SKIPPED = 0.25
"""Of a run's steps: the first ones, until it is steady."""
FEWEST_STEPS = 8
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    reached: Efficiencies
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


def calibrate(
    recipe: Recipe,
    policy: Policy,
    card: Card,
    lengths: Lengths,
    steps: Sequence[Mapping[str, Any]],
    *,
    reward_s: float,
) -> Calibration:
    """Fit the share of training to the trainer's seconds, and the time of a decode step to the
    generators' seconds for a token. What the controller makes of both is not fitted.

    Args:
        recipe: of the run, with its workers.
        card: that each of its workers had.
        steps: rows of its ledger, without the genesis.
        reward_s: of a completion: it is not fitted.

    Raises:
        RunError: there are too few steps.
    """
    rows = steps[int(SKIPPED * len(steps)) :]
    if len(rows) < FEWEST_STEPS:
        raise RunError(f"expected {FEWEST_STEPS} steady steps to calibrate to, found {len(rows)}")

    def mean(*names: str) -> float:
        return sum(float(row[name]) for row in rows for name in names) / len(rows)

    def costs_with(reached: Efficiencies) -> Any:
        return costs_of(recipe, policy, card, lengths, reached)

    token_s = mean("seconds_generate") / mean("num_generated_tokens")
    reached = Efficiencies(training=1.0, trajectory_s=0.0, reward_s=reward_s)
    at_peak = costs_with(reached).mean_train_s(recipe.controller.batch_size, lengths)
    training = at_peak / mean("seconds_read", "seconds_train", "seconds_stage")
    low, high = 0.0, token_s * recipe.generation.max_num_seqs
    for _ in range(ROUNDS):
        reached = replace(reached, training=training, decode_step_s=(low + high) / 2)
        found = simulated_run(recipe, costs_with(reached), lengths)
        busy_s = found.generators_busy * recipe.cluster.num_generators
        too_slow = busy_s / found.generated_tokens_per_s > token_s
        low, high = (low, reached.decode_step_s) if too_slow else (reached.decode_step_s, high)
    return Calibration(
        reached, mean("seconds_step"), found.step_s, mean("staleness_mean"), found.staleness_mean
    )
