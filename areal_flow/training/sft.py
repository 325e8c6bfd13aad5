"""Supervised fine-tuning, with AdamW, step by step: of completions, or of preferences among them.

A step depends on the weights, the optimizer's state, the seed and its number alone, so training
that goes on from a checkpoint makes the same bits as training that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_flow.algorithms.protocol import MinibatchSize
from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.core.durable import replace_file_durably
from areal_flow.core.errors import TrainingError
from areal_flow.core.failures import SkippedSteps
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.policy.checkpoints import (
    CheckpointState,
    checkpoint_path,
    list_checkpoints,
    move_damaged_checkpoint,
    prune_checkpoints,
)
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import (
    complete_checkpoint,
    read_checkpoint,
    take_snapshot,
    write_part,
)
from areal_flow.training.ranked_model import Minibatch
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import MinibatchPlan, TrainingSequence, plan_micro_batches
from areal_flow.training.settings import SftSettings, StepSettings, TrainerSettings, scheduled_rate
from areal_flow.training.step import policy_loss, train_step
from areal_flow.training.supervised import OBJECTIVES, read_metrics
from areal_flow.training.tensor_rows import TensorReaders

BY_TOKEN = DecoupledPPO(num_minibatches=1)
BY_SEQUENCE = DecoupledPPO(num_minibatches=1, aggregation="sequence_mean")
"""How a batch is split and losses are averaged; the loss itself is the objective's."""


@dataclass
class CompletionRows:
    """Tokenised rows: `tokens` of all sequences, `trained` where the policy is to learn them.

    A row has `num_completions` sequences, one after the other.
    """

    tokens: np.ndarray
    trained: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    num_completions: int = 1

    def __post_init__(self) -> None:
        self.ends = self.lengths.cumsum()
        self.behavior_logprobs = np.zeros(len(self.tokens), np.float32)
        """Zeros, or those of the reference that a trainer keeps here."""

    @classmethod
    def read(cls, path: Path, *, num_completions: int = 1) -> CompletionRows:
        if not path.is_file():
            nothing = np.zeros(0, np.int32)
            return cls(nothing, nothing, nothing, nothing)
        with np.load(path) as arrays:
            return cls(**arrays, num_completions=num_completions)

    def __len__(self) -> int:
        return len(self.lengths) // self.num_completions

    def sequences(self, row: int) -> list[TrainingSequence]:
        first = row * self.num_completions
        return [*map(self._sequence, range(first, first + self.num_completions))]

    def _sequence(self, index: int) -> TrainingSequence:
        start = self.ends[index] - self.lengths[index]
        prompt = slice(start, start + self.prompt_lengths[index])
        output = slice(prompt.stop, self.ends[index])
        return TrainingSequence(
            prompt_tokens=self.tokens[prompt],
            output_tokens=self.tokens[output],
            behavior_logprobs=self.behavior_logprobs[output],
            trained=self.trained[output],
            reward=0.0,
            group=0,
        )


class SftTrainer:
    """Fine-tunes a policy on rows; not for concurrent use."""

    def __init__(
        self,
        policy: Any,
        rows: CompletionRows,
        settings: SftSettings,
        trainer: TrainerSettings,
        seed: int,
        replicas: ReplicaGroup | None = None,
        weights: TensorReaders | None = None,
    ) -> None:
        """Take a policy, and weights where it has none yet."""
        self.rows, self.settings, self.seed, self.step = rows, settings, seed, 0
        self.metrics: list[dict[str, float]] = []
        """Of each step, from the first on."""
        self.backend = TrainerBackend(policy, trainer, replicas)
        if weights is not None:
            self.backend.load_weights(weights)
        self._skipped = SkippedSteps()
        self.objective = OBJECTIVES[self.settings.objective]
        self._step_settings = StepSettings(
            BY_SEQUENCE if self.objective.compares else BY_TOKEN,
            temperature=1.0,
            seed=self.seed,
            loss=lambda inputs: self.objective.loss(inputs, settings),
            packs_groups=self.objective.compares,
        )
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._num_trained_rows = len(self.rows) - self.settings.num_held_out
        if self.objective.needs_reference:
            self._keep_reference()

    def take_step(self) -> float:
        """Update the policy once; return the loss in nats, a token or a pair; NaN if skipped."""
        rate = self.learning_rate(self.step)
        result = train_step(
            self.backend,
            self._sequences(self._rows_of(self.step)),
            step=self.step,
            settings=self._step_settings,
            rate=rate,
        )
        self.step += 1
        self._skipped.count(self.step, skipped=not result.losses)
        if not result.losses:
            return nan
        metrics = {name: result.metrics[name].value for name in self.objective.metrics}
        numbers = {
            "loss": result.losses[0],
            "grad_norm": result.grad_norms[0],
            "learning_rate": rate,
        }
        due = self.step % self.settings.checkpoint_every_steps == 0
        if self.settings.num_held_out and (due or self.step == self.settings.num_steps):
            metrics |= self.measure_held_out()
        self.metrics.append({"step": self.step, **numbers, **metrics})
        return result.losses[0]

    def measure_held_out(self) -> dict[str, float]:
        sequences = self._sequences(range(self._num_trained_rows, len(self.rows)))
        size = MinibatchSize(sum(s.num_trained for s in sequences), len(sequences))
        policy = self.backend.trained
        batches = policy.batches(sequences, self._planned(sequences))
        minibatch = Minibatch(batches, size, 0.0, self._step_settings)
        loss = partial(policy_loss, self.backend, minibatch, None)
        with torch.no_grad():
            computed = {rank: policy.backward(minibatch, rank, loss) for rank in batches}
        numbers = policy.read(computed, torch.zeros(()))
        metrics = {
            f"held_out_{name}": numbers.metrics[name].value for name in self.objective.metrics
        }
        return {"held_out_loss": numbers.losses[0], **metrics}

    def learning_rate(self, step: int) -> float:
        """Return the rate of step 0, 1, ...: a warm-up times a schedule over all steps."""
        settings = self.settings
        warmup = min(1.0, (step + 1) / max(1, settings.num_warmup_steps))
        return scheduled_rate(
            settings.learning_rate * warmup,
            step=step + 1,
            schedule=settings.learning_rate_schedule,
            num_warmup_steps=0,
            num_decay_steps=settings.num_steps,
        )

    def save(self, layout: RunLayout, writer: Writer) -> Path:
        """Write a checkpoint: every rank its rows, the leader the rest."""
        root, replicas = layout.sft_checkpoints, self.backend.replicas
        root.mkdir(parents=True, exist_ok=True)
        writer.check_current()
        description = CheckpointState(self.step, self.backend.fingerprint(), 0, config_hash="")
        snapshot = take_snapshot(self.backend, description)
        write_part(root, snapshot, writer)
        replicas.wait_for_all()
        if replicas.is_leader:
            lines = "".join(json.dumps(row) + "\n" for row in self.metrics)
            replace_file_durably(layout.sft_metrics, lines)
            complete_checkpoint(root, layout.model, snapshot, writer)
            prune_checkpoints(root, keep=self.backend.settings.keep_checkpoints)
        replicas.wait_for_all()
        return checkpoint_path(root, self.step)

    def restore(self, layout: RunLayout) -> None:
        """Continue from the newest readable checkpoint, or from step 0."""
        for step in reversed(list_checkpoints(layout.sft_checkpoints)):
            path = checkpoint_path(layout.sft_checkpoints, step)
            try:
                self.step = read_checkpoint(path, self.backend).step
            except TrainingError as error:
                if self.backend.replicas.is_leader:
                    move_damaged_checkpoint(path, error)
                continue
            self.metrics = [row for row in read_metrics(layout) if row["step"] <= self.step]
            return

    def _sequences(self, rows: Sequence[int]) -> list[TrainingSequence]:
        return [replace(s, group=r) for r, row in enumerate(rows) for s in self.rows.sequences(row)]

    def _planned(self, sequences: Sequence[TrainingSequence]) -> MinibatchPlan:
        max_tokens = self.backend.settings.tokens_per_micro_batch
        num_ranks = self.backend.trained.num_batches
        (planned,) = plan_micro_batches(
            sequences,
            step=0,
            settings=self._step_settings,
            max_tokens=max_tokens,
            num_ranks=num_ranks,
        )
        return planned

    def _keep_reference(self) -> None:
        """Store the current policy's log-probabilities in the rows that training reads."""
        drawn = chain.from_iterable(map(self._rows_of, range(self.settings.num_steps)))
        held_out = range(self._num_trained_rows, len(self.rows))
        sequences = self._sequences(sorted({*drawn, *held_out}))
        policy, planned = self.backend.trained, self._planned(sequences)
        logprobs = policy.by_trajectory(
            partial(policy.logprobs, temperature=1.0), sequences, planned
        )
        for sequence, logprobs_M in zip(sequences, logprobs, strict=True):
            sequence.behavior_logprobs[sequence.trained] = logprobs_M.numpy()

    def _rows_of(self, step: int) -> list[int]:
        batch_size, num_rows = self.settings.batch_size, self._num_trained_rows
        places = (divmod(step * batch_size + offset, num_rows) for offset in range(batch_size))
        return [int(self._order(epoch)[position]) for epoch, position in places]

    def _make_order(self, epoch: int) -> np.ndarray:
        num_rows = self._num_trained_rows
        if not self.settings.shuffle:
            return np.arange(num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(num_rows)
