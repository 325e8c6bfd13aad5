"""Worked and blurted answers in, a policy that can do either out: supervised, one chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.config import WarmStartSettings
from areal_flow.trainer.sequences import TrainingSequence, pack_sequences
from areal_flow.trainer.step import micro_batch_logprobs


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the completion to imitate, stop token included."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]


class WarmStart:
    """Cross-entropy on completions; AdamW with a warm-up and a cosine to zero."""

    def __init__(
        self,
        policy: torch.nn.Module,
        examples: Sequence[Example],
        settings: WarmStartSettings,
        *,
        seed: int,
        tokens_per_micro_batch: int,
    ) -> None:
        self._policy = policy.train()
        self._examples = examples
        self._settings = settings
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._order = np.random.default_rng([seed, 7])
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0

    def run(self, num_steps: int) -> float:
        """Take up to `num_steps` more steps; return the last one's loss in nats a token."""
        loss = float("nan")
        for _ in range(min(num_steps, self._settings.num_steps - self.step)):
            loss = self._take_step()
        return loss

    def _take_step(self) -> float:
        chosen = self._order.integers(len(self._examples), size=self._settings.batch_size)
        sequences = [_imitate(self._examples[index]) for index in chosen]
        num_tokens = sum(sequence.num_trained for sequence in sequences)
        self._optimizer.param_groups[0]["lr"] = self._learning_rate()
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for indices in pack_first_fit_decreasing(
            [sequence.num_tokens for sequence in sequences],
            max_tokens=self._tokens_per_micro_batch,
        ):
            micro = pack_sequences([sequences[i] for i in indices], [0.0] * len(indices))
            loss = -micro_batch_logprobs(self._policy, micro, temperature=1.0).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return total

    def _learning_rate(self) -> float:
        progress = self.step / self._settings.num_steps
        warmup = min(1.0, (self.step + 1) / 50)
        return self._settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress))


def _imitate(example: Example) -> TrainingSequence:
    return TrainingSequence(
        prompt_tokens=example.prompt_tokens,
        output_tokens=example.output_tokens,
        behavior_logprobs=[0.0] * len(example.output_tokens),
        trained=[True] * len(example.output_tokens),
        reward=0.0,
        group=0,
    )
