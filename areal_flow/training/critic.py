"""A critic: a model of the policy's layers that predicts the reward to come, and its optimizer.

It is trainer's state: never served, in no hash of the policy, but in that of a checkpoint's
optimizer.

Letters: M chosen tokens of a micro-batch, B trajectories of a step, L tokens of the longest
completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_flow.algorithms.protocol import (
    AdvantageInputs,
    Metric,
    MinibatchSize,
    PolicyLoss,
    pad_rows,
)
from areal_flow.algorithms.registry import ActorCriticPPO
from areal_flow.core.types import CRITIC_SKIPPED_UPDATES
from areal_flow.policy.models.reward_model import critic_of, scores_at
from areal_flow.training.ranked_model import Minibatch, TrainedModel
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import MicroBatch, TrainingSequence
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.tensor_rows import TensorReaders, local_rows, strip_prefix

PREFIX = "critic."
"""Prefix of its tensors' names among the optimizer's."""

WEIGHTS, OPTIMIZER = f"{PREFIX}weights.", f"{PREFIX}optimizer."


class Critic:
    def __init__(
        self,
        policy: Any,
        settings: TrainerSettings,
        algorithm: ActorCriticPPO,
        replicas: ReplicaGroup,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._settings = settings.model_copy(
            update={"learning_rate": algorithm.critic.learning_rate, "optimizer": "adamw"}
        )
        model = critic_of(policy, device="meta")
        self.trained = TrainedModel(model, self._settings, replicas)
        self._begin()

    @property
    def model(self) -> Any:
        return self.trained.model

    @torch.no_grad()
    def _begin(self) -> None:
        """Start from the policy's layers, and scores of 0."""
        layers = self._policy.get_decoder().state_dict()
        for name, tensor in self.model.get_decoder().state_dict().items():
            local_rows(tensor)[0].copy_(local_rows(layers[name])[0])
        local_rows(self.model.score.weight)[0].zero_()
        self.trained.optimizer.load_named_state({})
        self.trained.reshard()

    def values(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """Return the value before every completion token, float64 `[B, L]`, on every rank."""
        all_tokens = [replace(s, trained=np.ones_like(s.trained)) for s in sequences]
        with torch.no_grad():
            rows = self.trained.by_trajectory(partial(self.trained.run, _values), all_tokens)
        return pad_rows(rows)

    def update(
        self,
        micro_batches: Mapping[int, Sequence[MicroBatch]],
        size: MinibatchSize,
        settings: StepSettings,
    ) -> dict[str, Metric]:
        """Make one update from sequences of `sequences_with_targets`, by rank."""
        minibatch = Minibatch(micro_batches, size, self._settings.learning_rate, settings)
        numbers = self.trained.update(minibatch, self._value_loss, name="critic's update")
        return {**numbers.metrics, CRITIC_SKIPPED_UPDATES: Metric(float(not numbers.losses), 1.0)}

    def sequences_with_targets(
        self, sequences: Sequence[TrainingSequence], inputs: AdvantageInputs
    ) -> list[TrainingSequence]:
        """Return sequences whose columns are the critic's.

        In place of behaviour log-probabilities are the values before the step, in place of
        advantages the targets: both are aligned as these are.
        """
        assert inputs.values_BL is not None
        valued = []
        targets_BL = self._algorithm.value_targets(inputs)
        for sequence, values_L, targets_L in zip(
            sequences, inputs.values_BL, targets_BL, strict=True
        ):
            length = len(sequence.output_tokens)
            values = values_L[:length].float().numpy()
            target = targets_L[:length].numpy().copy()
            valued.append(replace(sequence, behavior_logprobs=values, advantage=target))
        return valued

    def explained_variance(self, inputs: AdvantageInputs) -> dict[str, Metric]:
        """Return 1 - Var(R - V) / Var(R) over the trained tokens: 1 if all is predicted."""
        assert inputs.values_BL is not None
        targets_BL, trained_BL = self._algorithm.value_targets(inputs), inputs.padded_trained
        targets_N = targets_BL[trained_BL]
        rest_N = (targets_BL - inputs.values_BL)[trained_BL]
        variance = float(targets_N.var(correction=0)) if len(targets_N) else 0.0
        if variance == 0:
            return {}
        explained = 1 - float(rest_N.var(correction=0)) / variance
        return {"critic_explained_variance": Metric(explained, 1.0)}

    def _value_loss(self, micro: MicroBatch, rank: int) -> PolicyLoss:
        values_M = self.trained.run(_values, micro)
        # The columns of `sequences_with_targets`: old values and targets.
        return self._algorithm.value_loss(values_M, micro.behavior_logprobs_M, micro.advantages_M)

    def named_state(self) -> dict[str, Tensor]:
        state = self.trained.optimizer.named_state()
        return {f"{WEIGHTS}{name}": tensor for name, tensor in self.trained.tensors().items()} | {
            f"{OPTIMIZER}{name}": tensor for name, tensor in state.items()
        }

    def load(self, saved: TensorReaders) -> None:
        """Continue from what `named_state` returned; without it, from the policy's layers."""
        weights = strip_prefix(WEIGHTS, saved)
        if not weights:
            self._begin()
            return
        self.trained.load(weights)
        self.trained.load_optimizer(strip_prefix(OPTIMIZER, saved))


def _values(model: Any, micro: MicroBatch) -> Tensor:
    return scores_at(model, micro.input_ids_1T, micro.layout, micro.predicting_M)
