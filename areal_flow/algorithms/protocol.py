"""Inputs and outputs of an algorithm: advantages, losses and metrics.

Letters: T trained tokens of a micro-batch, S its sequences, N trained tokens of a minibatch, B
trajectories of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Advantage = float | Sequence[float] | NDArray[np.float64]
"""Of one trajectory: one number for all its completion tokens, or one number for each of them."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What advantages are computed from: the whole batch of a step, before it is split."""

    rewards_B: Tensor
    """float64."""
    num_trained_B: Tensor
    """Trained tokens of each trajectory, float64."""
    groups_B: Tensor
    """Which group each trajectory belongs to, int64."""
    num_tokens_B: Tensor
    """Completion tokens of each trajectory, masked ones included, float64."""
    trained: Sequence[NDArray[np.bool_]] = ()
    """Which of them are trained, of each trajectory."""
    values_BL: Tensor | None = None
    """A critic's value before each of them, float64, padded; None without a critic."""
    kl_N: Tensor | None = None
    """Estimated KL divergence from the reference at each trained token, one trajectory after the
    other, float64; None unless it is a part of the reward."""

    @property
    def padded_trained(self) -> Tensor:
        """`trained` as `[B, L]`, padded with False to the longest."""
        from torch import from_numpy  # here: recipes are read without torch

        return pad_rows([from_numpy(each) for each in self.trained])

    @property
    def trajectories(self) -> Tensor:
        """Index of each trained token's trajectory, `[N]`."""
        from torch import repeat_interleave

        return repeat_interleave(self.num_trained_B.long())

    @property
    def kl_sums(self) -> Tensor:
        """`kl_N`, added up over each trajectory, `[B]`; 0 without it."""
        zeros_B = self.rewards_B.new_zeros(len(self.rewards_B))
        return zeros_B if self.kl_N is None else zeros_B.index_add(0, self.trajectories, self.kl_N)

    def by_token(self, values_N: Tensor) -> list[NDArray[np.float64]]:
        """Return the values of trained tokens by trajectory, with 0 at the other tokens."""
        flat = np.zeros(sum(map(len, self.trained)))
        flat[np.concatenate(self.trained)] = values_N.numpy()
        return np.split(flat, np.cumsum([len(each) for each in self.trained])[:-1])


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return rows as `[B, L]`, padded with 0 to the longest.

    As torch's `pad_sequence`, but where the rows are, even if other tensors made meanwhile have no
    content, as those of `areal-flow plan --memory`.
    """
    import torch  # here: recipes are read without it

    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may depend on, one entry a trained token; a sequence is never split.

    A masked token (too old, or not the policy's own) has no entry.
    """

    logprobs_T: Tensor
    """Of the policy that is trained: what gradients flow through."""
    proximal_logprobs_T: Tensor
    """Of the policy before the step."""
    behavior_logprobs_T: Tensor
    """Of the distribution that each token was drawn from."""
    advantages_T: Tensor
    sequence_T: Tensor
    """Index of each token's sequence in the micro-batch, 0 to S - 1, ascending."""
    versions_T: Tensor
    """Policy version that sampled each token."""
    num_sequences: int
    """S: computing it here would wait for the device."""
    entropy_T: Tensor | None = None
    """In nats; with gradient if the algorithm needs it. A trainer always gives it."""
    reference_logprobs_T: Tensor | None = None
    """Of the reference policy; None if the algorithm does not need it."""
    bucket_logprobs_TK: Tensor | None = None
    """Of the policy that is trained, at the K - 1 tokens that the reference finds likeliest in
    each one's place, then of all others as one. None unless the algorithm asks for them."""
    reference_bucket_logprobs_TK: Tensor | None = None
    """The same of the reference policy."""
    policy_version: int = 0
    """Version of the policy before the step."""
    minibatch_bound: Tensor | None = None
    """What `ComposedAlgorithm.minibatch_bound` returned; None if it is not needed."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that adds up over micro-batches and ranks.

    A weighted mean, a maximum, or with squares an effective sample size as a fraction. The
    numbers of a loss are tensors, since to read each of them is to wait for its device: see
    `read_from_device`.
    """

    total: float | Tensor
    weight: float | None
    """What the total is divided by; None for a maximum."""
    squares: float | Tensor | None = None
    """Sum of the squares whose sum is the total; None for a mean and for a maximum."""

    @property
    def value(self) -> float:
        total = float(self.total)
        if self.squares is not None:
            return total**2 / ((self.weight or 1.0) * float(self.squares) or 1.0)
        return total / (self.weight or 1.0)

    def add(self, other: Metric) -> Metric:
        if self.weight is None or other.weight is None:
            return Metric(max(float(self.total), float(other.total)), None)
        squares = None
        if self.squares is not None and other.squares is not None:
            squares = float(self.squares) + float(other.squares)
        total = float(self.total) + float(other.total)
        return Metric(total, self.weight + other.weight, squares)


def sum_of(value: Tensor) -> Metric:
    """Return a metric whose `total` is the sum over the parts of a batch."""
    return Metric(value.detach().double(), 0.0)


def mean(values_T: Tensor) -> Metric:
    """Return the mean of one value a token, as a metric."""
    return Metric(values_T.detach().sum().double(), float(values_T.numel()))


def maximum(values_T: Tensor) -> Metric:
    """Return the maximum over tokens as a metric; of none it is minus infinity."""
    return Metric(values_T.detach().max().double() if values_T.numel() else float("-inf"), None)


def effective_sample_fraction(weights_T: Tensor) -> Metric:
    """Return (sum w)^2 / (N sum w^2) of N weights: 1 if all are equal, 1 / N if one is all."""
    weights_T = weights_T.detach()
    squares = weights_T.square().sum().double()
    return Metric(weights_T.sum().double(), float(weights_T.numel()), squares)


def read_from_device(batches: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """Return metrics without tensors; all are read together, so that the device is awaited once."""
    import torch  # here: recipes are read without it

    each = [metric for metrics in batches for metric in metrics.values()]
    numbers = [number for metric in each for number in (metric.total, metric.squares)]
    tensors = [number for number in numbers if isinstance(number, torch.Tensor)]
    values = iter(torch.stack(tensors).cpu().tolist() if tensors else ())

    def read(number: float | Tensor | None) -> Any:
        return next(values) if isinstance(number, torch.Tensor) else number

    def of(metric: Metric) -> Metric:
        return replace(metric, total=read(metric.total), squares=read(metric.squares))

    return [{name: of(metric) for name, metric in metrics.items()} for metrics in batches]


def add_metrics(first: Mapping[str, Metric], second: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of two parts of a batch as those of both."""
    added = {
        name: metric.add(first[name]) if name in first else metric
        for name, metric in second.items()
    }
    return {**first, **added}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss, one entry per token, and its metrics."""

    losses_T: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    clipped_T: Tensor | None = None
    """Where the objective has no gradient, since a bound or a rule of weights ended it; None for a
    loss without either."""


@dataclass(frozen=True, slots=True)
class MinibatchSize:
    """What a minibatch's loss is divided by: the same for all of its micro-batches and ranks."""

    num_tokens: int
    """Trained ones."""
    num_sequences: int
    """Those that have a trained token."""


TokenLoss = Callable[[LossInputs], PolicyLoss]
"""What a training step minimises. It must take inputs without a token, of a rank without work."""
