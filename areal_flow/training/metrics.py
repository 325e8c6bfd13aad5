"""The metrics of a step: of its batch, of what was trained of it, and of its updates.

All but the durations are the same on every rank and in every replay.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_flow.algorithms.advantages import rewards_are_equal
from areal_flow.algorithms.staleness import count_staleness
from areal_flow.core.pass_rates import PASS_RATE, passes
from areal_flow.core.types import TRAINED_BY_STALENESS, StepMetrics, StepRequest
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.settings import RankSettings

PERCENTILES = (10, 50, 90)

TrajectoryRows = Sequence[Mapping[str, Any]]


def step_metrics(
    request: StepRequest,
    rows: TrajectoryRows,
    sequences: Sequence[TrainingSequence],
    numbers: UpdateNumbers,
    *,
    settings: RankSettings,
    speed: Mapping[str, float],
    **seconds: float,
) -> StepMetrics:
    staleness = count_staleness(
        (sequence.trained_spans() for sequence in sequences),
        policy_version=request.policy_version,
        max_staleness=request.max_staleness,
    )
    ages = staleness.num_trained_by_staleness
    num_trained = sum(sequence.num_trained for sequence in sequences)
    num_tokens = sum(len(sequence.output_tokens) for sequence in sequences)
    weights = numbers.weights_2B
    means, maxima = [(), ()] if weights is None else map(_finite_or_none, weights.tolist())
    return StepMetrics(
        importance_weight_means=means,
        importance_weight_maxima=maxima,
        loss=_mean(numbers.losses),
        grad_norm=_mean(numbers.grad_norms),
        learning_rate=settings.trainer.learning_rate_at(request.step),
        reward_mean=_mean([sequence.reward for sequence in sequences]),
        completion_tokens_mean=num_tokens / len(sequences),
        num_trained_tokens=num_trained,
        num_masked_tokens=num_tokens - num_trained,
        staleness_mean=staleness.staleness_mean,
        staleness_max=staleness.staleness_max,
        masked_fraction_by_decile=masked_fraction_by_decile(
            [s.trained[row["loss_mask"]] for s, row in zip(sequences, rows, strict=True)]
        ),
        metrics={
            **masked_fractions(rows, sequences),
            **{name: metric.value for name, metric in numbers.metrics.items()},
            **batch_metrics(rows, pass_threshold=settings.pass_threshold),
            **{f"{TRAINED_BY_STALENESS}{age}": float(count) for age, count in sorted(ages.items())},
            **speed,
        },
        **seconds,
    )


def batch_metrics(rows: TrajectoryRows, *, pass_threshold: float) -> dict[str, float]:
    """Return metrics, by the names that sinks show, of trajectories' rows with rewards."""
    rewards = [row["reward"] for row in rows]
    groups = _split(rows, "submission_index", rewards).values()
    passed = [float(passes(reward, threshold=pass_threshold)) for reward in rewards]
    lengths = [len(row["output_tokens"]) for row in rows]
    percentiles = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    return {
        PASS_RATE: fmean(passed),
        **_part_means(rows),
        **{
            f"pass_rate/{column}_{value}": fmean(part)
            for column in ("source", "difficulty")
            for value, part in sorted(_split(rows, column, passed).items())
            if value != ""
        },
        "rollout/reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "rollout/zero_variance_groups_fraction": fmean(map(rewards_are_equal, groups)),
        "rollout/truncated_fraction": fmean(row["finish_reason"] == "length" for row in rows),
        **{f"rollout/completion_p{share}_tokens": value for share, value in percentiles},
    }


def _part_means(rows: TrajectoryRows) -> dict[str, float]:
    parts: dict[str, list[float]] = defaultdict(list)
    for part in chain.from_iterable(row["reward_parts"] for row in rows):
        parts[part["name"]] += [] if part["reward"] is None else [part["reward"]]
    if len(parts) < 2:
        return {}
    named = {f"reward/{label}_mean": parts[name] for name, label in labels(parts).items()}
    return {name: fmean(rewards) for name, rewards in named.items() if rewards}


def labels(verifiers: Iterable[str]) -> dict[str, str]:
    """Return short names of verifiers: of the function, or of its module too where two are alike.

    Sinks allow letters, digits, dots, dashes and underscores in them.
    """
    short = {name: name.partition("@")[0].rpartition(":")[2] for name in verifiers}
    alike = Counter(short.values())
    return {
        name: label if alike[label] == 1 else re.sub(r"[^\w.-]", "-", name)
        for name, label in short.items()
    }


def _split(rows: TrajectoryRows, column: str, values: Sequence[float]) -> dict[Any, list[float]]:
    parts: dict[Any, list[float]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        parts[row[column]].append(value)
    return parts


def masked_fraction_by_decile(masks: Sequence[NDArray[np.bool_]]) -> tuple[float, ...]:
    """Return the share of masked tokens in each tenth of the policy's own, by relative position."""
    lengths = np.array([len(mask) for mask in masks], np.int64)
    total = np.diff(-(-np.arange(11)[:, None] * lengths // 10), axis=0).sum(axis=1)
    trained = np.zeros(10, np.int64)
    for mask in masks:
        trained += np.bincount(np.flatnonzero(mask) * 10 // len(mask), minlength=10)
    return tuple(((total - trained) / np.maximum(total, 1)).tolist())


def masked_fractions(
    rows: TrajectoryRows, sequences: Sequence[TrainingSequence]
) -> dict[str, float]:
    """Return the fractions of completion tokens that are the environment's, and too old."""
    num_tokens = max(1, sum(len(s.trained) for s in sequences))
    num_chosen = sum(int(np.count_nonzero(row["loss_mask"])) for row in rows)
    num_environment = sum(len(row["loss_mask"]) for row in rows) - num_chosen
    num_stale = num_chosen - sum(s.num_trained for s in sequences)
    return {
        "masked_environment_fraction": num_environment / num_tokens,
        "masked_stale_fraction": num_stale / num_tokens,
    }


def _finite_or_none(values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(value if isfinite(value) else None for value in values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
