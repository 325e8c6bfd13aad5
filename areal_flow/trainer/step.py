"""One training step: sequences in, a changed policy and its numbers out.

Advantages over the whole batch, then minibatches, each one optimizer update, each packed into
micro-batches whose gradients add up: losses are divided by the trained tokens of the minibatch, so
neither the packing nor the number of ranks that share the micro-batches changes the gradient.

It refuses to know where sequences come from and where weights go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from areal_flow.algorithms.advantages import GROUP_RELATIVE, batch_norm_advantages
from areal_flow.algorithms.logprobs import next_token_logprobs
from areal_flow.algorithms.losses import PolicyLoss, TokenLoss, decoupled_ppo_loss
from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.config import AlgorithmSettings
from areal_flow.errors import TrainingError
from areal_flow.models.policy import logits_at
from areal_flow.trainer.replicas import ReplicaGroup, SingleProcess
from areal_flow.trainer.sequences import MicroBatch, TrainingSequence, pack_sequences
from areal_flow.trainer.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs beside the state and the sequences."""

    algorithm: AlgorithmSettings
    temperature: float
    seed: int
    num_ranks: int = 1
    loss: TokenLoss = decoupled_ppo_loss


@dataclass(slots=True)
class TokenNumbers:
    """Sums over trained tokens."""

    num_tokens: int = 0
    num_clipped: int = 0
    importance_weight_sum: float = 0.0
    importance_weight_max: float = 0.0

    def add(self, other: TokenNumbers) -> None:
        self.num_tokens += other.num_tokens
        self.num_clipped += other.num_clipped
        self.importance_weight_sum += other.importance_weight_sum
        self.importance_weight_max = max(self.importance_weight_max, other.importance_weight_max)


@dataclass(slots=True)
class UpdateNumbers(TokenNumbers):
    """Of all minibatches of a step, each of which was one update."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RankNumbers(TokenNumbers):
    """Of one rank's share of a minibatch."""

    loss: float = 0.0

    def tensor(self) -> Tensor:
        """Return the numbers as other ranks receive them."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> RankNumbers:
        num_tokens, num_clipped, *others = tensor.tolist()
        return cls(int(num_tokens), int(num_clipped), *others)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank computes of a minibatch; without `proximal`, its own forward pass serves."""

    micro_batches: Sequence[MicroBatch]
    proximal: Sequence[Tensor] | None


def train_step(
    state: TrainerState,
    sequences: Sequence[TrainingSequence],
    *,
    step: int,
    settings: StepSettings,
    replicas: ReplicaGroup | None = None,
) -> UpdateNumbers:
    """Update the policy once per minibatch; deterministic in (state, sequences, step, settings).

    Args:
        sequences: the whole batch, on every rank.
        replicas: the other ranks; without one this process computes every rank's share.

    Raises:
        TrainingError: a loss or a gradient is not finite. The state must not be used any more.
        TrainerLost: another rank left in the midst. The same.
    """
    replicas = replicas or SingleProcess(settings.num_ranks)
    advantages = compute_advantages(sequences, settings.algorithm)
    plan = plan_micro_batches(
        sequences, step=step, settings=settings, max_tokens=state.settings.tokens_per_micro_batch
    )
    minibatches = [
        {
            rank: _lay_out(
                state,
                sequences,
                advantages,
                minibatch[rank],
                settings,
                with_proximal=number > 0,
            )
            for rank in replicas.mine
        }
        for number, minibatch in enumerate(plan)
    ]
    state.set_learning_rate(state.learning_rate(step))
    numbers = UpdateNumbers()
    for minibatch, shares in zip(plan, minibatches, strict=True):
        members = [i for share in minibatch for indices in share for i in indices]
        if num_tokens := sum(sequences[member].num_trained for member in members):
            _update(state, shares, num_tokens, replicas, settings, numbers)
    return numbers


def _lay_out(
    state: TrainerState,
    sequences: Sequence[TrainingSequence],
    advantages: Sequence[float],
    micro_batches: Sequence[Sequence[int]],
    settings: StepSettings,
    *,
    with_proximal: bool,
) -> RankBatch:
    """Pack a rank's share, and take its proximal log-probabilities before anything is updated."""
    packed = [
        pack_sequences(
            [sequences[index] for index in indices],
            [advantages[index] for index in indices],
            device=state.settings.device,
        )
        for indices in micro_batches
    ]
    if not with_proximal:
        return RankBatch(packed, None)
    return RankBatch(
        packed, [_logprobs_without_gradient(state, micro, settings) for micro in packed]
    )


def plan_micro_batches(
    sequences: Sequence[TrainingSequence], *, step: int, settings: StepSettings, max_tokens: int
) -> list[list[list[list[int]]]]:
    """Return the indices of each minibatch's ranks' micro-batches; (seed, step) draw the order."""
    order = np.random.default_rng([settings.seed, step]).permutation(len(sequences))
    plan = []
    for part in np.array_split(order, settings.algorithm.num_minibatches):
        members = sorted(part.tolist())
        lengths = [sequences[member].num_tokens for member in members]
        packed = pack_first_fit_decreasing(lengths, max_tokens=max_tokens)
        if missing := -len(packed) % settings.num_ranks:
            packed = pack_first_fit_decreasing(
                lengths, max_tokens=max_tokens, min_micro_batches=len(packed) + missing
            )
        micro_batches = [[members[index] for index in indices] for indices in packed]
        plan.append(
            [micro_batches[rank :: settings.num_ranks] for rank in range(settings.num_ranks)]
        )
    return plan


def compute_advantages(
    sequences: Sequence[TrainingSequence], settings: AlgorithmSettings
) -> list[float]:
    """Return one advantage a trajectory, normalised over the whole batch or its groups."""
    rewards_B = torch.tensor([s.reward for s in sequences], dtype=torch.float64)
    if settings.advantage == "batch_norm":
        num_tokens_B = torch.tensor([s.num_trained for s in sequences], dtype=torch.float64)
        return batch_norm_advantages(
            rewards_B, num_tokens_B, bias=settings.reward_bias, scale=settings.reward_scale
        ).tolist()
    groups_B = torch.tensor([s.group for s in sequences])
    return GROUP_RELATIVE[settings.advantage](rewards_B, groups_B).tolist()


def _update(
    state: TrainerState,
    shares: Mapping[int, RankBatch],
    num_tokens: int,
    replicas: ReplicaGroup,
    settings: StepSettings,
    numbers: UpdateNumbers,
) -> None:
    """Make one optimizer update of a minibatch with so many trained tokens."""
    computed = {
        rank: _compute_share(state, share, num_tokens, settings) for rank, share in shares.items()
    }
    of_ranks = replicas.gather({rank: mine.tensor() for rank, (mine, _) in computed.items()})
    found = [RankNumbers.from_tensor(tensor) for tensor in of_ranks]
    loss_total = sum(share.loss for share in found)
    for index, parameter in enumerate(state.policy.parameters()):
        mine = {rank: gradients[index] for rank, (_, gradients) in computed.items()}
        parameter.grad = reduce(torch.add, replicas.gather(mine))
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
    for share_numbers in found:
        numbers.add(share_numbers)
    numbers.losses.append(loss_total)
    numbers.grad_norms.append(grad_norm)


def _compute_share(
    state: TrainerState, share: RankBatch, num_tokens: int, settings: StepSettings
) -> tuple[RankNumbers, list[Tensor]]:
    """Return the numbers and the gradients of one rank's share, in the order of parameters."""
    state.optimizer.zero_grad(set_to_none=True)
    numbers = RankNumbers()
    for index, micro in enumerate(share.micro_batches):
        proximal_M = None if share.proximal is None else share.proximal[index]
        loss = _micro_batch_loss(state, micro, proximal_M, settings)
        (loss.loss_sum / num_tokens).backward()  # type: ignore[no-untyped-call]
        numbers.loss += float(loss.loss_sum.detach()) / num_tokens
        numbers.add(
            TokenNumbers(
                micro.targets_M.numel(),
                int(loss.num_clipped),
                float(loss.importance_weight_sum),
                float(loss.importance_weight_max),
            )
        )
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in state.policy.parameters()
    ]
    return numbers, gradients


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
        importance_weight_rule=algorithm.importance_weight_rule,
        importance_weight_cap=algorithm.importance_weight_cap,
    )


def micro_batch_logprobs(
    policy: torch.nn.Module, micro: MicroBatch, *, temperature: float
) -> Tensor:
    """Return the policy's log-probabilities of the trained tokens, `[M]`, in packing order."""
    logits_MV = logits_at(
        policy, micro.input_ids_1T, micro.layout.position_ids, micro.layout, micro.predicting_M
    )
    return next_token_logprobs(logits_MV, micro.targets_M, temperature=temperature)


@torch.no_grad()
def _logprobs_without_gradient(
    state: TrainerState, micro: MicroBatch, settings: StepSettings
) -> Tensor:
    with state.autocast():
        return micro_batch_logprobs(state.policy, micro, temperature=settings.temperature)
