"""One training step: sequences in, a changed policy and its numbers out.

Advantages over the whole batch, then minibatches, each one optimizer update, each packed into
micro-batches whose gradients add up: losses are divided by the trained tokens of the minibatch, so
the packing does not change the gradient.

It refuses to know where sequences come from and where weights go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areal_flow.algorithms.advantages import GROUP_RELATIVE, paper_advantages
from areal_flow.algorithms.logprobs import next_token_logprobs
from areal_flow.algorithms.losses import PolicyLoss, TokenLoss, decoupled_ppo_loss
from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.config import AlgorithmSettings
from areal_flow.errors import TrainingError
from areal_flow.trainer.sequences import MicroBatch, TrainingSequence, pack_sequences
from areal_flow.trainer.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs beside the state and the sequences."""

    algorithm: AlgorithmSettings
    temperature: float
    seed: int
    loss: TokenLoss = decoupled_ppo_loss


@dataclass(slots=True)
class UpdateNumbers:
    """Sums over the minibatches of a step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_clipped: int = 0
    behavior_weight_sum: float = 0.0
    behavior_weight_max: float = 0.0

    def add(self, loss: PolicyLoss, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_clipped += int(loss.num_clipped)
        self.behavior_weight_sum += float(loss.behavior_weight_sum)
        self.behavior_weight_max = max(self.behavior_weight_max, float(loss.behavior_weight_max))


def train_step(
    state: TrainerState, sequences: Sequence[TrainingSequence], *, step: int, settings: StepSettings
) -> UpdateNumbers:
    """Update the policy once per minibatch; deterministic in (state, sequences, step, seed).

    Raises:
        TrainingError: a loss or a gradient is not finite. The state must not be used any more.
    """
    advantages = compute_advantages(sequences, settings.algorithm)
    minibatches = [
        [
            pack_sequences(
                [sequences[index] for index in indices],
                [advantages[index] for index in indices],
                device=state.settings.device,
            )
            for indices in minibatch
        ]
        for minibatch in plan_micro_batches(
            sequences,
            step=step,
            settings=settings,
            max_tokens=state.settings.tokens_per_micro_batch,
        )
    ]
    later_proximal = [
        [_logprobs_without_gradient(state, micro, settings) for micro in minibatch]
        for minibatch in minibatches[1:]
    ]
    state.set_learning_rate(state.learning_rate(step))
    numbers = UpdateNumbers()
    for minibatch, proximal in zip(minibatches, [None, *later_proximal], strict=True):
        _update(state, minibatch, proximal, settings, numbers)
    return numbers


def plan_micro_batches(
    sequences: Sequence[TrainingSequence], *, step: int, settings: StepSettings, max_tokens: int
) -> list[list[list[int]]]:
    """Return the indices in each minibatch's micro-batches, in an order drawn from (seed, step)."""
    order = np.random.default_rng([settings.seed, step]).permutation(len(sequences))
    plan = []
    for part in np.array_split(order, settings.algorithm.num_minibatches):
        members = sorted(part.tolist())
        packed = pack_first_fit_decreasing(
            [sequences[member].num_tokens for member in members], max_tokens=max_tokens
        )
        plan.append([[members[index] for index in indices] for indices in packed])
    return plan


def compute_advantages(
    sequences: Sequence[TrainingSequence], settings: AlgorithmSettings
) -> list[float]:
    """Return one advantage a trajectory, normalised over the whole batch or its groups."""
    rewards_B = torch.tensor([s.reward for s in sequences], dtype=torch.float64)
    if settings.advantage == "paper":
        num_tokens_B = torch.tensor([s.num_trained for s in sequences], dtype=torch.float64)
        return paper_advantages(
            rewards_B, num_tokens_B, bias=settings.reward_bias, scale=settings.reward_scale
        ).tolist()
    groups_B = torch.tensor([s.group for s in sequences])
    return GROUP_RELATIVE[settings.advantage](rewards_B, groups_B).tolist()


def _update(
    state: TrainerState,
    minibatch: Sequence[MicroBatch],
    proximal: Sequence[Tensor] | None,
    settings: StepSettings,
    numbers: UpdateNumbers,
) -> None:
    num_tokens = sum(micro.targets_M.numel() for micro in minibatch)
    if not num_tokens:
        return
    state.optimizer.zero_grad(set_to_none=True)
    loss_total = 0.0
    for index, micro in enumerate(minibatch):
        proximal_M = None if proximal is None else proximal[index]
        loss = _micro_batch_loss(state, micro, proximal_M, settings)
        (loss.loss_sum / num_tokens).backward()  # type: ignore[no-untyped-call]
        loss_total += float(loss.loss_sum.detach()) / num_tokens
        numbers.add(loss, micro.targets_M.numel())
    grad_norm = float(
        torch.nn.utils.clip_grad_norm_(state.policy.parameters(), state.settings.max_grad_norm)
    )
    if not (np.isfinite(loss_total) and np.isfinite(grad_norm)):
        raise TrainingError(
            f"expected a finite loss and gradient, found loss {loss_total} and gradient norm "
            f"{grad_norm}: nothing of this step was published; start a new run with a lower "
            "trainer.learning_rate"
        )
    state.optimizer.step()
    numbers.losses.append(loss_total)
    numbers.grad_norms.append(grad_norm)


def _micro_batch_loss(
    state: TrainerState, micro: MicroBatch, proximal_M: Tensor | None, settings: StepSettings
) -> PolicyLoss:
    with state.autocast():
        logprobs_M = micro_batch_logprobs(state.policy, micro, temperature=settings.temperature)
    algorithm = settings.algorithm
    return settings.loss(
        logprobs_M,
        proximal_logprobs_T=logprobs_M.detach() if proximal_M is None else proximal_M,
        behavior_logprobs_T=micro.behavior_logprobs_M,
        advantages_T=micro.advantages_M,
        epsilon_low=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high or algorithm.epsilon,
        behavior_weight_rule=algorithm.behavior_weight_rule,
        behavior_weight_cap=algorithm.behavior_weight_cap,
    )


def micro_batch_logprobs(
    policy: torch.nn.Module, micro: MicroBatch, *, temperature: float
) -> Tensor:
    """Return the policy's log-probabilities of the trained tokens, `[M]`, in packing order."""
    hidden_TD = policy.model(  # type: ignore[operator]
        input_ids=micro.input_ids_1T,
        position_ids=micro.layout.position_ids,
        use_cache=False,
        layout=micro.layout,
    ).last_hidden_state[0]
    logits_MV = policy.lm_head(hidden_TD[micro.predicting_M])  # type: ignore[operator]
    return next_token_logprobs(logits_MV, micro.targets_M, temperature=temperature)


@torch.no_grad()
def _logprobs_without_gradient(
    state: TrainerState, micro: MicroBatch, settings: StepSettings
) -> Tensor:
    with state.autocast():
        return micro_batch_logprobs(state.policy, micro, temperature=settings.temperature)
