"""The gap between engine and trainer at the same weights: sums, metrics and the warning."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.logprobs import (
    NUM_BINS,
    NUM_MOMENTS,
    gap_metrics,
    gap_sums,
    zero_gap_sums,
)
from areal_flow.algorithms.registry import PPO, DecoupledPPO
from areal_flow.core.types import VersionSpan
from areal_flow.flow.diagnosis import EFFECTIVE_SAMPLES, GapWatch, StalenessWatch, is_wide
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from pipelines.pages.report import judge_engine_gap
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, state

MEAN, P99 = "engine_gap/logprob_difference_mean", "engine_gap/logprob_difference_p99"


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.3])
def test_metrics_are_those_of_all_tokens_together(spread: float) -> None:
    draw = np.random.default_rng(0)
    engine = -draw.exponential(1.0, 20_000).astype(np.float32)
    trainer = (engine + spread * draw.standard_t(3, len(engine))).astype(np.float32)
    fresh = draw.random(len(engine)) < 0.4
    parts = zip(*(np.array_split(each, 7) for each in (trainer, engine, fresh)), strict=True)
    sums_K = sum(gap_sums(*map(torch.from_numpy, part)) for part in parts)
    assert isinstance(sums_K, torch.Tensor)
    metrics = gap_metrics(sums_K)
    x, y = trainer[fresh].astype(np.float64), engine[fresh].astype(np.float64)
    assert metrics["engine_gap/tokens"] == fresh.sum()
    assert metrics[MEAN] == pytest.approx(np.abs(x - y).mean(), rel=1e-12)
    assert metrics["engine_gap/kl"] == pytest.approx(
        (np.expm1(x - y) - (x - y)).mean(), rel=1e-12, abs=1e-18
    )
    assert metrics[P99] == pytest.approx(np.quantile(np.abs(x - y), 0.99), rel=0.06)
    correlation = np.corrcoef(np.exp(x), np.exp(y))[0, 1]
    assert metrics["engine_gap/probability_correlation"] == pytest.approx(correlation, abs=1e-12)


def test_there_are_no_metrics_without_tokens_and_damaged_ones_do_not_count() -> None:
    infinite = torch.tensor([-1.0, -torch.inf, torch.nan, -2.0])
    engine = torch.tensor([-1.5, -1.0, -1.0, -9.0])
    none_T = torch.zeros(4, dtype=torch.bool)
    assert gap_metrics(gap_sums(infinite, engine, none_T)) == {}
    metrics = gap_metrics(gap_sums(infinite, engine, torch.tensor([True, True, True, False])))
    assert (metrics["engine_gap/tokens"], metrics[MEAN]) == (1.0, 0.5)
    assert "engine_gap/probability_correlation" not in metrics


@pytest.mark.parametrize("difference", [0.0, 1e-9, 1e3])
def test_differences_beyond_the_bins_are_in_the_first_and_the_last(difference: float) -> None:
    engine = torch.zeros(5, dtype=torch.float64)
    sums = gap_sums(engine - difference, engine, torch.ones(5, dtype=torch.bool))
    counts = sums[NUM_MOMENTS:].tolist()
    assert len(counts) == NUM_BINS
    assert counts[-1 if difference > 1 else 0] == 5
    assert gap_metrics(sums)[P99] <= 100


def fresh_sequences(*, disturbed_by: float, version: int = 2) -> list[TrainingSequence]:
    """Return sequences sampled by the small policy, with these errors in log-probabilities."""
    policy = small_policy()
    policy.set_attn_implementation("eager")
    sequences = []
    for index, each in enumerate(make_sequences()):
        ids = torch.tensor(np.concatenate([each.prompt_tokens, each.output_tokens]))[None].long()
        with torch.no_grad():
            logprobs_TV = policy(input_ids=ids).logits[0].double().log_softmax(-1)
        before = torch.arange(len(each.prompt_tokens) - 1, ids.shape[1] - 1)
        exact = logprobs_TV[before, ids[0, before + 1]]
        signs = torch.arange(len(exact)) % 2 * 2.0 - 1
        behavior = (exact + disturbed_by * signs).float().numpy()
        old = len(exact) // 3 if index % 2 else 0
        spans = (VersionSpan(version - 1, old), VersionSpan(version, len(exact) - old))
        behavior[:old] = -7.0  # as far off as staleness may be: it must not be seen
        sequences.append(replace(each, behavior_logprobs=behavior, version_spans=spans))
    return sequences


def gap_of_step(
    sequences: list[TrainingSequence], algorithm: ComposedAlgorithm, *, num_ranks: int = 1
) -> dict[str, float]:
    metrics = numbers_of_step(sequences, algorithm, num_ranks=num_ranks).metrics
    return {n: metric.value for n, metric in metrics.items() if n.startswith("engine_gap/")}


def numbers_of_step(
    sequences: list[TrainingSequence], algorithm: ComposedAlgorithm, *, num_ranks: int = 1
) -> UpdateNumbers:
    settings = TrainerSettings(learning_rate=1e-2, tokens_per_micro_batch=64)
    backend = TrainerBackend(small_policy(), settings, ReplicaGroup(num_ranks))
    how = StepSettings(algorithm, temperature=1.0, seed=0)
    return train_step(backend, sequences, step=3, settings=how)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("disturbed_by", [0.0, 0.125])
def test_step_measures_the_gap_of_an_engine(disturbed_by: float, num_ranks: int) -> None:
    sequences = fresh_sequences(disturbed_by=disturbed_by)
    metrics = gap_of_step(sequences, DecoupledPPO(num_minibatches=3), num_ranks=num_ranks)
    fresh = [span.length for s in sequences for span in s.trained_spans() if span.version == 2]
    assert metrics["engine_gap/tokens"] == sum(fresh)
    assert metrics[MEAN] == pytest.approx(disturbed_by, abs=2e-6)
    assert metrics[P99] == pytest.approx(disturbed_by, rel=0.12, abs=2e-6)
    assert metrics["engine_gap/kl"] == pytest.approx(disturbed_by**2 / 2, rel=0.02, abs=1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_of_each_trajectory_are_those_of_its_trained_tokens(num_ranks: int) -> None:
    random = np.random.default_rng(0)
    sequences, log_weights = list[TrainingSequence](), list[Any]()
    for each in fresh_sequences(disturbed_by=0.0)[::2]:  # all of their tokens are fresh
        log_weights.append(random.normal(0, 0.5, len(each.trained)).astype(np.float32))
        shifted = each.behavior_logprobs - log_weights[-1]
        sequences.append(replace(each, behavior_logprobs=shifted))
    sequences[1] = replace(sequences[1], trained=np.zeros_like(sequences[1].trained))
    numbers = numbers_of_step(sequences, DecoupledPPO(num_minibatches=3), num_ranks=num_ranks)
    expected = [
        [weights.mean(), weights.max()] if len(weights) else [np.nan, np.nan]
        for s, logs in zip(sequences, log_weights, strict=True)
        for weights in [np.exp(logs[s.trained])]
    ]
    assert numbers.weights_2B is not None
    np.testing.assert_allclose(numbers.weights_2B.T, expected, rtol=1e-5)


def test_policy_that_was_updated_already_is_not_compared() -> None:
    """PPO computes no proximal policy: only its first minibatch uses the initial policy."""
    sequences = fresh_sequences(disturbed_by=0.0)
    metrics = gap_of_step(sequences, PPO(num_minibatches=3))
    assert (
        0
        < metrics["engine_gap/tokens"]
        < gap_of_step(sequences, PPO(num_minibatches=1))["engine_gap/tokens"]
    )
    assert metrics[MEAN] < 2e-6
    numbers = numbers_of_step(sequences, PPO(num_minibatches=3))
    assert numbers.weights_2B is not None
    first = {index for micro_batches in numbers.plan[0] for row in micro_batches for index in row}
    computed = numbers.weights_2B.isfinite().all(dim=0).tolist()
    assert {index for index, each in enumerate(computed) if each} == first != set()
    assert gap_of_step(fresh_sequences(disturbed_by=0.0, version=1), PPO()) == {}


def test_gap_is_the_same_to_the_bit_again_and_costs_no_pass() -> None:
    sequences = fresh_sequences(disturbed_by=0.1)
    algorithm = DecoupledPPO(num_minibatches=2)
    assert gap_of_step(sequences, algorithm) == gap_of_step(sequences, algorithm)
    backend, passes = state(), list[Any]()
    backend.policy.model.layers[0].register_forward_pre_hook(lambda *layer: passes.append(layer))
    how = StepSettings(PPO(num_minibatches=2), temperature=1.0, seed=0)
    numbers = train_step(backend, sequences, step=3, settings=how)
    assert len(passes) == sum(len(micro) for minibatch in numbers.plan for micro in minibatch)


def wide(step: int, **metrics: float) -> dict[str, Any]:
    gap = {"tokens": 500.0, "logprob_difference_mean": 0.2, "kl": 0.03} | metrics
    return {"step": step, "metrics": {f"engine_gap/{n}": value for n, value in gap.items()}}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, True),
        ({"logprob_difference_mean": 0.02}, True),
        ({"kl": 0.001}, True),
        ({"logprob_difference_mean": 0.05, "kl": 0.01}, False),
        ({"tokens": 99.0}, False),
    ],
)
def test_gap_is_wide_above_either_bound(metrics: dict[str, float], expected: bool) -> None:
    assert is_wide(wide(1, **metrics)["metrics"]) == expected
    assert not is_wide({})


def test_run_warns_once_and_names_the_remedies_in_order(caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, Any]] = []
    with caplog.at_level(logging.WARNING):
        for driver in range(2):  # the second goes on with the run
            watch = GapWatch(lambda: rows)
            for step in range(3 * driver, 3 * driver + 3):
                rows.append(wide(step, kl=0.5) if step % 2 else {"step": step, "metrics": {}})
                watch.count(rows[-1])
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("step 1: engine and trainer give the same tokens other log-prob")
    remedies = "dtype", "head", "fp8", "batch-invariant kernels", "TIS", "IcePop"
    places = [text.index(remedy) for remedy in remedies]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("fraction", "staleness", "warns"), [(0.84, 8.0, True), (0.86, 8.0, False), (0.5, 0.2, False)]
)
def test_run_warns_once_where_its_policy_moves_too_far_for_the_age_of_its_data(
    caplog: pytest.LogCaptureFixture, fraction: float, staleness: float, warns: bool
) -> None:
    watch, metrics = StalenessWatch(), {EFFECTIVE_SAMPLES: fraction}
    with caplog.at_level(logging.WARNING):
        for step in range(1, 40):
            watch.count({"step": step, "staleness_mean": staleness, "metrics": metrics})
        watch.count({"step": 40, "staleness_mean": staleness, "metrics": {}})
    assert [record.getMessage()[:8] for record in caplog.records] == ["step 10:"] * warns


def test_report_judges_engine_and_trainer_by_all_steps_and_by_the_last() -> None:
    near = wide(1, logprob_difference_mean=0.01, kl=1e-4)["metrics"]
    far = wide(2)["metrics"]
    assert judge_engine_gap([{"entropy_mean": 1.0}]) == []
    (verdict,) = judge_engine_gap([near, {}, near])
    assert "2 of 3 steps had tokens" in verdict.detail
    assert (verdict.mark, verdict.text[:34]) == ("good", "Engine and trainer differ by 0.01 ")
    (verdict,) = judge_engine_gap([near, far])
    assert (verdict.mark, verdict.text[-24:]) == ("bad", "too much in 1 of 2 steps")
    assert "IcePop" in verdict.detail
    (verdict,) = judge_engine_gap([far, near])
    assert verdict.mark == "look"


def test_percentile_of_the_first_bin_is_even_in_it() -> None:
    engine = torch.zeros(100, dtype=torch.float64)
    metrics = gap_metrics(gap_sums(engine - 1e-9, engine, torch.ones(100, dtype=torch.bool)))
    assert metrics[P99] == pytest.approx(0.99 * 10 ** (-8 + 1 / 20), rel=1e-12)


def test_gap_is_measured_where_all_tokens_are_fresh() -> None:
    sequences = [
        replace(each, version_spans=(VersionSpan(2, len(each.output_tokens)),))
        for each in fresh_sequences(disturbed_by=0.0)
    ]
    metrics = gap_of_step(sequences, DecoupledPPO(num_minibatches=1))
    assert metrics["engine_gap/tokens"] == sum(s.num_trained for s in sequences)


def test_sums_are_exact_over_many_tokens() -> None:
    sums = zero_gap_sums([0, 1], "cpu")
    assert {rank: each.dtype for rank, each in sums.items()} == dict.fromkeys((0, 1), torch.float64)
