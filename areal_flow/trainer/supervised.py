"""What supervised fine-tuning may learn, by the name that recipes use.

The next objective is a name in `config.SupervisedObjective`, an entry here and its tests: rows,
batches, checkpoints and their resumption are the same for all. Importing it loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areal_flow.algorithms.preferences import PREFERENCE_METRICS, dpo_loss, reward_model_loss
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.config import SftSettings, SupervisedObjective
from areal_flow.run.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Objective:
    """One thing to learn from a prompt and its completions."""

    loss: Callable[[LossInputs, SftSettings], PolicyLoss]
    metrics: tuple[str, ...]
    """What is shown of a step beside loss, gradient norm and rate."""
    fields: tuple[str, ...] = ("completion",)
    """Of a row: its completions, each a sequence; those of a row are never split."""
    needs_reference: bool = False
    """Whether the loss reads the first policy's log-probabilities, as those of the behaviour."""
    makes_reward_model: bool = False
    """Whether what is trained is a reward model, whose completions have no stop token."""

    @property
    def compares(self) -> bool:
        """Whether the loss is of a row as a whole: a mean over rows instead of tokens."""
        return len(self.fields) > 1


def _cross_entropy(inputs: LossInputs, _: SftSettings) -> PolicyLoss:
    """Return minus the log-probability of each trained token."""
    return PolicyLoss(-inputs.logprobs_T)


def _dpo(inputs: LossInputs, settings: SftSettings) -> PolicyLoss:
    return dpo_loss(inputs, beta=settings.beta, label_smoothing=settings.label_smoothing)


def _reward_model(inputs: LossInputs, settings: SftSettings) -> PolicyLoss:
    return reward_model_loss(inputs, label_smoothing=settings.label_smoothing)


PAIR = ("chosen", "rejected")
OBJECTIVES: Mapping[SupervisedObjective, Objective] = {
    "cross_entropy": Objective(_cross_entropy, ("entropy_mean",)),
    "dpo": Objective(_dpo, (*PREFERENCE_METRICS, "entropy_mean"), PAIR, needs_reference=True),
    "reward_model": Objective(_reward_model, PREFERENCE_METRICS, PAIR, makes_reward_model=True),
}


def read_metrics(layout: RunLayout) -> list[dict[str, float]]:
    """Return what was found at each step of supervised fine-tuning, as far as it was written."""
    path = layout.sft_metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
