"""What a training step did to its trajectories, token by token.

Nothing here changes a policy. Forward passes are packed as the trainer packs them, but every
completion token is looked at, those that are masked out of the loss as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss, TokenLoss
from areal_flow.trainer.backend import StepSettings, TrainerBackend
from areal_flow.trainer.sequences import TrainingSequence, token_versions
from areal_flow.trainer.step import compute_advantages, pack_micro_batches, plan_micro_batches


@dataclass(frozen=True, slots=True)
class TrajectoryOutcome:
    """What one way to compute a step did to a trajectory; one entry a completion token."""

    advantage: float
    """Of its tokens on average, where each has its own."""
    trained: tuple[bool, ...]
    clipped: tuple[bool, ...]
    """Where the clip had ended the gradient by the time of the token's update."""
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
    staleness_max: int
    behavior_logprobs: tuple[float, ...]
    proximal_logprobs: tuple[float, ...]
    replayed: TrajectoryOutcome
    changed: TrajectoryOutcome | None = None

    @property
    def importance_weights(self) -> tuple[float, ...]:
        """Return w = pi_prox / pi_behav of each token."""
        log_weights = np.subtract(self.proximal_logprobs, self.behavior_logprobs)
        return tuple(np.exp(log_weights).tolist())

    @property
    def differences(self) -> tuple[float, ...]:
        """Return what the change made of each token's log-probability; without one, the step."""
        if self.changed is None:
            before, after = self.proximal_logprobs, self.replayed.logprobs
        else:
            before, after = self.replayed.logprobs, self.changed.logprobs
        return tuple(np.subtract(after, before).tolist())

    @property
    def mean_difference(self) -> float:
        """Return the mean size of the differences, whatever their signs."""
        return sum(map(abs, self.differences)) / max(1, len(self.differences))


class ClipWatch:
    """A loss that also keeps which tokens the clip had stopped, in the order of their updates."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss = loss
        self.clipped: list[bool] = []

    def __call__(self, inputs: LossInputs) -> PolicyLoss:
        found = self._loss(inputs)
        nothing_T = torch.zeros(inputs.logprobs_T.numel(), dtype=torch.bool)
        clipped_T = nothing_T if found.clipped_T is None else found.clipped_T
        self.clipped.extend(clipped_T.tolist())
        return found


def completion_logprobs(
    backend: TrainerBackend, sequences: Sequence[TrainingSequence], *, temperature: float
) -> list[tuple[float, ...]]:
    """Return the log-probability of every completion token under the policy, by sequence."""
    whole = [replace(s, trained=[True] * len(s.output_tokens)) for s in sequences]
    packed = pack_first_fit_decreasing(
        [sequence.num_tokens for sequence in whole],
        max_tokens=backend.settings.tokens_per_micro_batch,
    )
    micro_batches = pack_micro_batches(whole, packed, device=backend.settings.device)
    logprobs_T = torch.cat(backend.logprobs(micro_batches, temperature=temperature))
    order = list(chain.from_iterable(packed))
    parts = torch.split(logprobs_T, [len(whole[index].output_tokens) for index in order])
    found = {index: tuple(part.tolist()) for index, part in zip(order, parts, strict=True)}
    return [found[index] for index in range(len(whole))]


def trajectory_outcomes(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    watch: ClipWatch,
    *,
    step: int,
    settings: StepSettings,
    temperature: float,
) -> list[TrajectoryOutcome]:
    """Return what a step did to each of its sequences.

    Args:
        backend: after the step.
        watch: the loss that the step was computed with.
        settings: of the step.
        temperature: to see log-probabilities at; not that of the step, if two are compared.
    """
    advantages = compute_advantages(sequences, settings.algorithm)
    logprobs = completion_logprobs(backend, sequences, temperature=temperature)
    plan = plan_micro_batches(
        sequences,
        step=step,
        settings=settings,
        max_tokens=backend.settings.tokens_per_micro_batch,
    )
    clipped = iter(watch.clipped)
    clipped_by_sequence = {
        index: tuple(trained and next(clipped) for trained in sequences[index].trained)
        for minibatch in plan
        for index in chain.from_iterable(chain.from_iterable(minibatch))
    }
    return [
        TrajectoryOutcome(
            float(np.mean(advantages[index])),
            tuple(sequence.trained),
            clipped_by_sequence[index],
            logprobs[index],
        )
        for index, sequence in enumerate(sequences)
    ]


def inspect_trajectories(
    rows: Sequence[Mapping[str, Any]],
    *,
    policy_version: int,
    proximal_logprobs: Sequence[tuple[float, ...]],
    replayed: Sequence[TrajectoryOutcome],
    changed: Sequence[TrajectoryOutcome] | None,
) -> tuple[InspectedTrajectory, ...]:
    """Put together what is stored of trajectories and what steps made of them.

    Args:
        policy_version: that the step started from.
        proximal_logprobs: under that policy, one a completion token.
    """
    inspected = []
    for index, row in enumerate(rows):
        versions = tuple(token_versions(row))
        trajectory = InspectedTrajectory(
            trajectory_id=row["trajectory_id"],
            reward=row["reward"],
            tokens=tuple(row["output_tokens"]),
            versions=versions,
            staleness_max=policy_version - min(versions, default=policy_version),
            behavior_logprobs=tuple(row["behavior_logprobs"]),
            proximal_logprobs=proximal_logprobs[index],
            replayed=replayed[index],
            changed=changed[index] if changed else None,
        )
        inspected.append(trajectory)
    return tuple(inspected)
