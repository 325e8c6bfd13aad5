"""The numbers of one training step, and which of them say that an update was skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SKIPPED_UPDATES = "skipped_updates_fraction"
"""The metric of a step's updates that changed nothing, since a loss or gradient was not finite."""
CRITIC_SKIPPED_UPDATES = "critic_skipped_updates_fraction"
"""The same, of a critic's."""
TRAINED_BY_STALENESS = "staleness/trained_tokens_"
"""The beginning of a metric's name; their staleness, in versions, follows."""
ENGINE_GAP = "engine_gap/"
"""The same, of metrics that compare a rollout engine with the trainer at the same weights."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Numbers of one step that every algorithm has; tokens are completion tokens, seconds are wall
    time. `metrics` holds what the step's algorithm computes besides, by name."""

    loss: float
    grad_norm: float
    learning_rate: float
    reward_mean: float
    completion_tokens_mean: float
    num_trained_tokens: int
    num_masked_tokens: int
    staleness_mean: float
    staleness_max: int
    masked_fraction_by_tenth: tuple[float, ...]
    seconds_read: float
    seconds_train: float
    seconds_stage: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def skipped_an_update(self) -> bool:
        """Whether an update of the policy or of a critic changed nothing."""
        names = (SKIPPED_UPDATES, CRITIC_SKIPPED_UPDATES)
        return any(self.metrics.get(name, 0.0) > 0 for name in names)


NOTHING_TRAINED = StepMetrics(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0, (), 0.0, 0.0, 0.0)
"""The metrics of the genesis."""
