"""What a training step did to its trajectories, token by token; nothing here changes a policy.

Every completion token is included, those that are masked out of the loss as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from areal_flow.algorithms.protocol import Advantage, LossInputs, PolicyLoss, TokenLoss
from areal_flow.algorithms.staleness import fresh_enough
from areal_flow.core.types import StepRequest
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.sequences import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrajectoryOutcome:
    """What a step did to a trajectory; one entry per completion token."""

    advantage: float
    """Of its trained tokens on average, where each has its own."""
    trained: tuple[bool, ...]
    clipped: tuple[bool, ...]
    """Where a clip or a rule of weights had ended the gradient by the time of the update."""
    logprobs: tuple[float, ...]
    """After the step."""

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class InspectedTrajectory:
    """A trajectory before a step, after it and, if another was tried, after that one."""

    trajectory_id: str
    reward: float
    tokens: tuple[int, ...]
    versions: tuple[int, ...]
    too_old: tuple[bool, ...]
    """Which tokens the bound of staleness leaves out; others without gradient are the
    environment's."""
    staleness_max: int
    behavior_logprobs: tuple[float, ...]
    proximal_logprobs: tuple[float, ...]
    replayed: TrajectoryOutcome
    changed: TrajectoryOutcome | None = None

    @property
    def importance_weights(self) -> tuple[float, ...]:
        log_weights = np.subtract(self.proximal_logprobs, self.behavior_logprobs)
        return tuple(np.exp(log_weights).tolist())

    @property
    def differences(self) -> tuple[float, ...]:
        """Change of each token's log-probability: by the changed step, or else by the step."""
        if self.changed is None:
            before, after = self.proximal_logprobs, self.replayed.logprobs
        else:
            before, after = self.replayed.logprobs, self.changed.logprobs
        return tuple(np.subtract(after, before).tolist())

    @property
    def mean_difference(self) -> float:
        return sum(map(abs, self.differences)) / max(1, len(self.differences))


class ClipWatch:
    """A loss that also keeps which tokens had no gradient, in the order of their updates."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss = loss
        self.clipped: list[bool] = []

    def __call__(self, inputs: LossInputs) -> PolicyLoss:
        loss = self._loss(inputs)
        nothing_T = torch.zeros(inputs.logprobs_T.numel(), dtype=torch.bool)
        clipped_T = nothing_T if loss.clipped_T is None else loss.clipped_T
        self.clipped.extend(clipped_T.tolist())
        return loss


def completion_logprobs(
    backend: TrainerBackend, sequences: Sequence[TrainingSequence], *, temperature: float
) -> list[tuple[float, ...]]:
    all_tokens = [replace(s, trained=np.ones_like(s.trained)) for s in sequences]
    policy = backend.trained
    logprobs = policy.by_trajectory(partial(policy.logprobs, temperature=temperature), all_tokens)
    return [tuple(logprobs_M.tolist()) for logprobs_M in logprobs]


def trajectory_outcomes(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    numbers: UpdateNumbers,
    watch: TokenLoss | None,
    *,
    temperature: float,
) -> list[TrajectoryOutcome]:
    """Return what a step did to each of its sequences, with the backend as it is after the step.

    Args:
        numbers: of the step.
        watch: its loss, a `ClipWatch`.
        temperature: to see log-probabilities at; not that of the step, if two are compared.
    """
    assert isinstance(watch, ClipWatch), "a step that is inspected is watched"
    logprobs = completion_logprobs(backend, sequences, temperature=temperature)
    watched = iter(watch.clipped)
    clipped = {
        index: tuple(trained and next(watched) for trained in sequences[index].trained.tolist())
        for minibatch in numbers.plan
        for index in chain.from_iterable(chain.from_iterable(minibatch))
    }
    return [
        TrajectoryOutcome(
            _mean_advantage(numbers.advantages[index], s.trained),
            tuple(s.trained.tolist()),
            clipped[index],
            logprobs[index],
        )
        for index, s in enumerate(sequences)
    ]


def inspect_trajectories(
    request: StepRequest,
    sequences: Sequence[TrainingSequence],
    proximal_logprobs: Sequence[tuple[float, ...]],
    replayed: Sequence[TrajectoryOutcome],
    changed: Sequence[TrajectoryOutcome] | None,
) -> tuple[InspectedTrajectory, ...]:
    """Join a step's request and its outcomes, by trajectory."""
    bound = {"policy_version": request.policy_version, "max_staleness": request.max_staleness}
    trajectories = []
    for index, sequence in enumerate(sequences):
        spans = sequence.version_spans
        versions = tuple(version for version, length in spans for _ in range(length))
        trajectory = InspectedTrajectory(
            trajectory_id=request.trajectory_ids[index],
            reward=sequence.reward,
            tokens=tuple(sequence.output_tokens.tolist()),
            versions=versions,
            too_old=tuple(not fresh_enough(version, **bound) for version in versions),
            staleness_max=max((request.policy_version - span.version for span in spans), default=0),
            behavior_logprobs=tuple(sequence.behavior_logprobs.tolist()),
            proximal_logprobs=proximal_logprobs[index],
            replayed=replayed[index],
            changed=changed[index] if changed else None,
        )
        trajectories.append(trajectory)
    return tuple(trajectories)


def _mean_advantage(advantage: Advantage, trained: NDArray[np.bool_]) -> float:
    if isinstance(advantage, float):
        return advantage
    return float(np.asarray(advantage)[trained].mean()) if trained.any() else 0.0
