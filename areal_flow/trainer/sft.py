"""Supervised fine-tuning: cross-entropy on completions, with AdamW, step by step.

A step depends on the weights, the optimizer's state, the seed and its number alone, so training
that goes on from a checkpoint makes the same bits as training that was never stopped. This module
does not know where rows come from, or which process it runs in.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.algorithms.learning_rates import scheduled_rate
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.config import SftSettings, TrainerSettings
from areal_flow.controller.skipped_steps import SkippedSteps
from areal_flow.errors import TrainingError
from areal_flow.recovery.checkpoints import (
    CheckpointState,
    checkpoint_path,
    list_checkpoints,
    pass_over,
    prune_checkpoints,
)
from areal_flow.recovery.lease import Writer
from areal_flow.trainer.backend import StepSettings, make_backend
from areal_flow.trainer.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step

ONE_UPDATE = DecoupledPPO(num_minibatches=1)
"""How a step is made of a batch; its loss is replaced by the cross-entropy."""


@dataclass(frozen=True, slots=True)
class CompletionRows:
    """Tokenised rows: `tokens` of all, one after the other; row r begins at `starts[r]`.

    `trained` is as long as `tokens`, and true where the policy speaks.
    """

    tokens: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray

    @classmethod
    def read(cls, path: Path) -> CompletionRows:
        """Read what `tokenise_completions` wrote; no file is no rows."""
        if not path.is_file():
            return cls(*(np.zeros(0, np.int32) for _ in range(5)))
        with np.load(path) as arrays:
            lengths = arrays["lengths"]
            starts = np.cumsum(lengths) - lengths
            tokens, trained = arrays["tokens"], arrays["trained"]
            return cls(tokens, trained, starts, arrays["prompt_lengths"], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, row: int) -> TrainingSequence:
        """Return a row as a sequence whose completion is trained, stop token included."""
        start = int(self.starts[row])
        begin, end = start + int(self.prompt_lengths[row]), start + int(self.lengths[row])
        return TrainingSequence(
            prompt_tokens=self.tokens[start:begin],
            output_tokens=self.tokens[begin:end],
            behavior_logprobs=np.zeros(end - begin, np.float32),
            trained=self.trained[begin:end],
            reward=0.0,
            group=0,
        )


def cross_entropy(inputs: LossInputs) -> PolicyLoss:
    """Return minus the log-probability of each trained token."""
    return PolicyLoss(-inputs.logprobs_T)


@dataclass
class SftTrainer:
    """A policy that learns rows; not for concurrent use."""

    policy: InitVar[Any]
    rows: CompletionRows
    settings: SftSettings
    trainer: InitVar[TrainerSettings]
    seed: int
    step: int = 0

    def __post_init__(self, policy: Any, trainer: TrainerSettings) -> None:
        self.backend = make_backend(policy.train(), trainer)
        self._skipped = SkippedSteps(trainer.adamw.max_skipped_steps)
        self._order = lru_cache(maxsize=2)(self._make_order)

    def take_step(self) -> float:
        """Update the policy once; return the loss in nats a trained token.

        Not a number where the update was skipped.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
        found = train_step(
            self.backend,
            [self.rows.sequence(row) for row in self._rows_of(self.step)],
            step=self.step,
            settings=StepSettings(ONE_UPDATE, 1.0, self.seed, loss=cross_entropy),
            rate=self.learning_rate(self.step),
        )
        self.step += 1
        self._skipped.count(self.step, skipped=not found.losses)
        return found.losses[0] if found.losses else nan

    def learning_rate(self, step: int) -> float:
        """Return the rate of step 0, 1, ...: a warm-up times a schedule over all steps."""
        settings = self.settings
        warmup = min(1.0, (step + 1) / max(1, settings.num_learning_rate_warmup_steps))
        return scheduled_rate(
            settings.learning_rate * warmup,
            step=step + 1,
            schedule=settings.learning_rate_schedule,
            num_warmup_steps=0,
            num_decay_steps=settings.num_steps,
        )

    def save(self, root: Path, model_directory: Path, writer: Writer) -> Path:
        """Write a checkpoint of this step, a Hugging Face directory; return where it lies.

        Raises:
            RunError: another driver took over.
            StorageError: the disk refused; older checkpoints are intact.
        """
        description = CheckpointState(self.step, self.backend.fingerprint(), 0, config_hash="")
        snapshot = Snapshot(self.backend.save(), description)
        path = write_checkpoint(root, model_directory, snapshot, writer)
        prune_checkpoints(root, keep=self.backend.settings.keep_checkpoints)
        return path

    def restore(self, root: Path) -> None:
        """Go on from the newest checkpoint that can be read; without one, from step 0."""
        for step in reversed(list_checkpoints(root)):
            path = checkpoint_path(root, step)
            try:
                self.step = read_checkpoint(path, self.backend).step
                return
            except TrainingError as error:
                pass_over(path, error)

    def _rows_of(self, step: int) -> list[int]:
        batch_size, num_rows = self.settings.batch_size, len(self.rows)
        places = (divmod(step * batch_size + offset, num_rows) for offset in range(batch_size))
        return [int(self._order(epoch)[position]) for epoch, position in places]

    def _make_order(self, epoch: int) -> np.ndarray:
        num_rows = len(self.rows)
        if not self.settings.shuffle:
            return np.arange(num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(num_rows)
