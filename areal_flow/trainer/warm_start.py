"""Worked and blurted answers in, a policy that can do either out: supervised, chunk by chunk.

Worked answers come first, so that the skill is there; blurted ones are mixed in late, so that the
policy has a habit for reinforcement learning to change. Examples whose sums are rare are drawn more
often.
"""

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

NUM_WARMUP_STEPS = 30
FINAL_RATE = 0.03


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its two answers, stop tokens included, and how often to draw it."""

    prompt_tokens: Sequence[int]
    worked_tokens: Sequence[int]
    blurted_tokens: Sequence[int]
    weight: float = 1.0


class WarmStart:
    """Cross-entropy on completions; AdamW with a short warm-up and a cosine."""

    def __init__(
        self,
        policy: torch.nn.Module,
        examples: Sequence[Example],
        settings: WarmStartSettings,
        *,
        seed: int,
        tokens_per_micro_batch: int,
    ) -> None:
        self.policy = policy.train()
        self.step = 0
        self._examples = examples
        self._settings = settings
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._random = np.random.default_rng([seed, 7])
        weights = np.array([example.weight for example in examples])
        self._cumulative = np.cumsum(weights / weights.sum())
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def run(self, num_steps: int) -> float:
        """Take up to `num_steps` more steps; return the last one's loss in nats a token."""
        loss = float("nan")
        for _ in range(min(num_steps, self._settings.num_steps - self.step)):
            loss = self._take_step()
        return loss

    def _take_step(self) -> float:
        sequences = self._draw()
        num_tokens = sum(sequence.num_trained for sequence in sequences)
        self._optimizer.param_groups[0]["lr"] = self._learning_rate()
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for indices in pack_first_fit_decreasing(
            [sequence.num_tokens for sequence in sequences],
            max_tokens=self._tokens_per_micro_batch,
        ):
            micro = pack_sequences([sequences[i] for i in indices], [0.0] * len(indices))
            loss = -micro_batch_logprobs(self.policy, micro, temperature=1.0).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return total

    def _draw(self) -> list[TrainingSequence]:
        settings = self._settings
        drawn = self._random.random(settings.batch_size)
        chosen = np.minimum(
            np.searchsorted(self._cumulative, drawn, side="right"), len(self._examples) - 1
        )
        mixed = self.step >= settings.num_steps * (1 - settings.mixed_phase)
        worked_fraction = settings.worked_fraction if mixed else 1.0
        worked = self._random.random(settings.batch_size) < worked_fraction
        return [
            _imitate(self._examples[index], worked=bool(is_worked))
            for index, is_worked in zip(chosen, worked, strict=True)
        ]

    def _learning_rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / self._settings.num_steps))
        warmup = min(1.0, (self.step + 1) / NUM_WARMUP_STEPS)
        return self._settings.learning_rate * warmup * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def _imitate(example: Example, *, worked: bool) -> TrainingSequence:
    output_tokens = example.worked_tokens if worked else example.blurted_tokens
    return TrainingSequence(
        prompt_tokens=example.prompt_tokens,
        output_tokens=output_tokens,
        behavior_logprobs=[0.0] * len(output_tokens),
        trained=[True] * len(output_tokens),
        reward=0.0,
        group=0,
    )
