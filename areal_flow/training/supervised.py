"""What supervised fine-tuning may learn, by the name that recipes use; importing it loads no torch.

The next objective is a name in `settings.SftObjectiveName`, an entry here and its tests.

Of pairs of completions the one that is preferred is first: sequences 2p and 2p + 1 of a micro-batch
are pair p. Each token of a pair carries the pair's loss, so that a mean over tokens and then over
sequences is the mean over pairs.
Letters: T trained tokens of a micro-batch, S its sequences, P its pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_flow.algorithms.logprobs import expand_to_tokens, sequence_sums
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss, mean
from areal_flow.core.layout import RunLayout
from areal_flow.training.settings import SftObjectiveName, SftSettings

if TYPE_CHECKING:
    from torch import Tensor

PREFERENCE_METRICS = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")


@dataclass(frozen=True, slots=True)
class SftObjective:
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
        """Whether the loss compares a row's completions: a mean over rows, not tokens."""
        return len(self.fields) > 1


def dpo_loss(inputs: LossInputs, settings: SftSettings) -> PolicyLoss:
    """Return the loss of `pair_loss` for the implicit reward beta (log pi - log ref) of a sequence.

    Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7). The log-probabilities
    of the reference policy are in `behavior_logprobs_T`.
    """
    log_ratio_T = inputs.logprobs_T - inputs.behavior_logprobs_T
    rewards_T = settings.beta * log_ratio_T
    rewards_S = sequence_sums(rewards_T, inputs.sequence_T, inputs.num_sequences)
    return pair_loss(rewards_S, inputs.sequence_T, label_smoothing=settings.label_smoothing)


def reward_model_loss(inputs: LossInputs, settings: SftSettings) -> PolicyLoss:
    """Return the loss of `pair_loss` for the scores of a reward model after each last token.

    The model of Bradley and Terry (Ouyang et al., arXiv 2203.02155, eq. 1). A reward model has
    scores where a policy has log-probabilities.
    """
    sequence_T = inputs.sequence_T
    lengths_S = sequence_sums(
        sequence_T.new_ones(len(sequence_T)), sequence_T, inputs.num_sequences
    )
    last_S = lengths_S.cumsum(0) - 1
    scores_S = inputs.logprobs_T[last_S]
    return pair_loss(scores_S, sequence_T, label_smoothing=settings.label_smoothing)


def pair_loss(rewards_S: Tensor, sequence_T: Tensor, *, label_smoothing: float) -> PolicyLoss:
    """Return l_p = -(1 - e) log sigmoid(h_p) - e log sigmoid(-h_p), h_p the margin of a pair.

    Args:
        rewards_S: of the chosen and the rejected completion by turns; h is their difference.
        label_smoothing: e, how likely a label is wrong (conservative DPO: Mitchell, 2023, "A note
            on DPO with noisy preferences", eq. 3).
    """
    from torch.nn.functional import logsigmoid  # here: recipes are read without torch

    chosen_P, rejected_P = rewards_S[0::2], rewards_S[1::2]
    margin_P = chosen_P - rejected_P
    losses_P = -(1 - label_smoothing) * logsigmoid(margin_P)
    losses_P = losses_P - label_smoothing * logsigmoid(-margin_P)
    watched_P = ((margin_P > 0).float(), margin_P, chosen_P, rejected_P)
    metrics = zip(PREFERENCE_METRICS, map(mean, watched_P), strict=True)
    return PolicyLoss(expand_to_tokens(losses_P, sequence_T // 2), dict(metrics))


def cross_entropy(inputs: LossInputs, _: SftSettings) -> PolicyLoss:
    return PolicyLoss(-inputs.logprobs_T)


PAIR = ("chosen", "rejected")
OBJECTIVES: Mapping[SftObjectiveName, SftObjective] = {
    "cross_entropy": SftObjective(cross_entropy, ("entropy_mean",)),
    "dpo": SftObjective(
        dpo_loss, (*PREFERENCE_METRICS, "entropy_mean"), PAIR, needs_reference=True
    ),
    "reward_model": SftObjective(
        reward_model_loss, PREFERENCE_METRICS, PAIR, makes_reward_model=True
    ),
}


def read_metrics(layout: RunLayout) -> list[dict[str, float]]:
    path = layout.sft_metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
