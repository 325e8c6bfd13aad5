"""What an optimizer update is given and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.protocol import Advantage, Metric, MinibatchSize, TokenLoss
from areal_flow.training.sequences import MicroBatch

MinibatchPlan = list[list[list[int]]]
"""Of one minibatch: the indices of the sequences of each rank's micro-batches."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs beside the policy and the sequences."""

    algorithm: ComposedAlgorithm
    temperature: float
    seed: int
    loss: TokenLoss | None = None
    """Minimised instead of the algorithm's own."""
    packs_groups: bool = False
    """Whether a group's sequences lie side by side in one micro-batch, for a loss of them all."""

    @property
    def token_loss(self) -> TokenLoss:
        return self.loss or self.algorithm.loss

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads proximal log-probabilities, as one that is not known may."""
        return self.loss is not None or self.algorithm.needs_proximal


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer update computes."""

    micro_batches: Mapping[int, Sequence[MicroBatch]]
    """By rank, of the ranks that this process computes."""
    size: MinibatchSize
    learning_rate: float
    settings: StepSettings
    policy_version: int = 0
    """Of the policy before the step."""
    gap_sums: Mapping[int, Tensor] | None = None
    """Of the engine, by rank, to be added to; nothing waits for them before the step's end. None
    where the pass has no log-probabilities of the policy before the step."""


@dataclass(slots=True)
class UpdateNumbers:
    """What updates found, each of a minibatch: of one, or of all of a step but the skipped ones."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    advantages: list[Advantage] = field(default_factory=list, compare=False)
    """Of a step, one a trajectory; arrays cannot be compared as the rest is."""
    plan: list[MinibatchPlan] = field(default_factory=list, compare=False)
    """Of a step: how it was split."""
