"""The numbers of one training step, and when updates that were skipped end a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_flow.core.errors import TrainingError

SKIPPED_UPDATES = "skipped_updates_fraction"
"""The metric of a step's updates that changed nothing, since a loss or gradient was not finite."""
CRITIC_SKIPPED_UPDATES = "critic_skipped_updates_fraction"
"""The same, of a critic's."""
TRAINED_BY_STALENESS = "staleness/trained_tokens_"
"""The beginning of a metric's name; their staleness, in versions, follows."""
SPEED_AREA = "speed/"
"""The same, of metrics of throughput and utilization, which depend on the machine."""
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
    masked_fraction_by_decile: tuple[float, ...]
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

MAX_SKIPPED_STEPS = 5
"""After so many in a row a run ends: the policy will not recover by itself."""


@dataclass
class SkippedSteps:
    """Ends a run in which too many steps in a row skipped an update."""

    _num_in_a_row: int = 0

    def count(self, step: int, *, skipped: bool) -> None:
        self._num_in_a_row = self._num_in_a_row + 1 if skipped else 0
        if self._num_in_a_row >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"expected a finite loss and gradient, found {self._num_in_a_row} steps in a row, "
                f"the last one {step}, with an update that was skipped because loss or gradient "
                "was not finite: start a new run with a lower learning rate"
            )
