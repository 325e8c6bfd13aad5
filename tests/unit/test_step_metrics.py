"""Metrics of a step from its rows and times: golden numbers, and what a replay compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_flow.algorithms import logprobs
from areal_flow.algorithms.logprobs import detached_entropies, next_token_entropies
from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.cluster.control import usage_by_role
from areal_flow.core.types import (
    NOTHING_TRAINED,
    TRAINED_BY_STALENESS,
    PolicyHashes,
    ServedWeights,
    StepResult,
)
from areal_flow.flow.recovery.restore import ComparedStep
from areal_flow.log.ledger_row import (
    SPEED_COLUMNS,
    reward_metrics,
    speed_metrics,
    update_metrics,
)
from areal_flow.tracking.projection import METRICS
from areal_flow.training.metrics import batch_metrics, labels, masked_fractions
from areal_flow.training.step import advantage_moments
from tests.unit.test_losses import inputs


def row(group: int, reward: float, num_tokens: int, **columns: Any) -> dict[str, Any]:
    return {
        "submission_index": group,
        "source": "",
        "difficulty": 2 + group // 2,
        "reward": reward,
        "reward_parts": [],
        "finish_reason": "stop",
        "output_tokens": [7] * num_tokens,
        **columns,
    }


ROWS = [
    row(0, 1.0, 1),
    row(0, 0.7 + 0.2 + 0.1, 2),  # not 1.0, by rounding
    row(1, 0.0, 3),
    row(1, 0.75, 4),
    row(2, 0.0, 10, finish_reason="length"),
    row(2, 0.0, 10, finish_reason="length"),
]


def test_batch_is_described_by_its_rows() -> None:
    assert batch_metrics(ROWS, pass_threshold=0.5) == pytest.approx(
        {
            "rollout/pass_rate": 3 / 6,
            "pass_rate/difficulty_2": 3 / 4,
            "pass_rate/difficulty_3": 0.0,
            "rollout/reward_std": 0.510310363,
            "rollout/zero_variance_groups_fraction": 2 / 3,
            "rollout/truncated_fraction": 2 / 6,
            "rollout/completion_p10_tokens": 1.5,
            "rollout/completion_p50_tokens": 3.5,
            "rollout/completion_p90_tokens": 10.0,
        }
    )


def metrics_of_losses() -> set[str]:
    """Return the metrics of each algorithm with all options enabled."""
    given = replace(inputs(), reference_logprobs_T=inputs().logprobs_T)
    algorithms = [algorithm(kl_coefficient=0.1) for algorithm in ALGORITHMS.values()]
    return {name for algorithm in algorithms for name in algorithm.loss(given).metrics}


def test_page_of_metrics_names_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = {
        *METRICS,
        *batch_metrics([row(0, 1.0, 1, difficulty="N")], pass_threshold=0.5),
        *speed_metrics(dict.fromkeys(SPEED_COLUMNS, 1.0), num_generators=1),
        f"{TRAINED_BY_STALENESS}N",
        *usage_by_role([("ROLE", {"gpu": {"utilization": 1, "memory-used": 1}})]),
        *update_metrics([ServedWeights(1, "h", 0.0, 0.0)]),
        *reward_metrics([0.0], num_scored=1, step_s=1.0),
        *(f"train/{name}" for name in ("entropy_mean", *metrics_of_losses())),
        *(f"train/{name}" for name in (*advantage_moments([]), *masked_fractions([], []))),
    }
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_several_rewards_each_have_their_mean() -> None:
    def parts(*rewards: float | None) -> dict[str, Any]:
        named = zip(("numeric", "shipped:brief@1f0c2a9b77d3"), rewards, strict=False)
        return {"reward_parts": [{"name": n, "reward": r} for n, r in named]}

    rows = [row(0, 1.0, 1, **parts(1.0, 0.5)), row(0, 0.0, 1, **parts(0.0, None))]
    metrics = batch_metrics(rows, pass_threshold=0.5)
    assert metrics["reward/numeric_mean"] == 0.5
    assert metrics["reward/brief_mean"] == 0.5, "where it gave one"
    rows = [row(0, 1.0, 1, **parts(1.0, None))]
    named = {n for n in batch_metrics(rows, pass_threshold=0.5) if n.startswith("reward/")}
    assert named == {"reward/numeric_mean"}
    alone = batch_metrics([row(0, 1.0, 1, **parts(1.0))], pass_threshold=0.5)
    assert not [name for name in alone if name.startswith("reward/")]


def test_verifiers_are_called_by_their_functions_unless_two_are_alike() -> None:
    given = ["numeric", "own.graders:judge", "shipped:f@1f0c2a9b77d3", "shipped:f@2ed01f903528"]
    expected = ["numeric", "judge", "shipped-f-1f0c2a9b77d3", "shipped-f-2ed01f903528"]
    assert labels(given) == dict(zip(given, expected, strict=True))


def test_batch_of_one_has_no_deviation() -> None:
    assert batch_metrics(ROWS[:1], pass_threshold=0.5)["rollout/reward_std"] == 0


def test_speed_is_by_time_and_by_generator() -> None:
    totals = dict(zip(SPEED_COLUMNS, (4.0, 6.0, 0.5, 1.0, 0.5, 100, 80), strict=True))
    assert speed_metrics(totals, num_generators=2) == {
        "speed/generated_tokens_per_s": 25.0,
        "speed/trained_tokens_per_s": 20.0,
        "speed/generators_busy_fraction": 0.75,
        "speed/trainer_busy_fraction": 0.5,
    }
    assert speed_metrics({**totals, "step_s": 0.0}, num_generators=2) == {}
    metrics = speed_metrics(totals, num_generators=2, observed_s=7.5)
    assert metrics["speed/generators_busy_fraction"] == 0.8, "of the time in which they worked"


def test_updates_are_reported_by_mean_and_maximum() -> None:
    served = [ServedWeights(3, "h", 0.2, 0.01), ServedWeights(3, "h", 0.4, 0.03)]
    assert update_metrics(served) == pytest.approx(
        {
            "speed/weights_num_served": 2,
            "speed/weights_transfer_s_mean": 0.3,
            "speed/weights_transfer_s_max": 0.4,
            "speed/weights_stall_s_mean": 0.02,
            "speed/weights_stall_s_max": 0.03,
        }
    )
    assert update_metrics([]) == {}


def result(**metrics: float) -> StepResult:
    values = replace(
        NOTHING_TRAINED, metrics={name.replace("_", "/", 1): metrics[name] for name in metrics}
    )
    return StepResult(1, PolicyHashes("w", "s"), values, '{"device": "cpu"}', "p")


def test_replay_compares_what_rows_say_and_no_times() -> None:
    recorded = result(rollout_reward_std=0.5, speed_trainer_busy_fraction=0.5)
    assert ComparedStep(recorded, result(rollout_reward_std=0.5)).equal
    other = ComparedStep(recorded, result(rollout_reward_std=0.25))
    assert other.differences == {"rollout/reward_std": (0.5, 0.25)}
    assert ComparedStep(recorded, result()).differences == {"rollout/reward_std": (0.5, None)}
    assert ComparedStep(result(), recorded).equal, "an older version did not know this metric"


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_entropy_in_parts_is_that_of_the_whole(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_NUMBERS", 33)  # three rows
    logits_TV = torch.randn(num_rows, 11, dtype=torch.bfloat16, requires_grad=True)
    entropies_T = detached_entropies(logits_TV, temperature=0.7)
    assert not entropies_T.requires_grad
    torch.testing.assert_close(
        entropies_T, next_token_entropies(logits_TV.detach(), temperature=0.7)
    )


def test_rewards_are_counted_by_time_and_their_queue_by_group() -> None:
    metrics = reward_metrics([0.25, 0.75], num_scored=16, step_s=4.0)
    assert metrics == {
        "speed/rewards_per_s": 4.0,
        "speed/reward_queue_s_mean": 0.5,
        "speed/reward_queue_s_max": 0.75,
    }
    assert reward_metrics([], num_scored=0, step_s=4.0) == {}
    assert reward_metrics([0.5], num_scored=4, step_s=0.0) == {}


def test_usage_is_summed_over_the_workers_of_each_role() -> None:
    device = {"utilization": 80, "memory-used": 6e9}
    beats = [
        ("generator", {"cpu": 90.0, "memory": 200e6, "gpu": device}),
        ("generator", {"cpu": 80.0, "memory": 300e6, "gpu": device}),
        ("driver", {"cpu": 5.0, "memory": 100e6}),
        ("reward", {}),
    ]
    assert usage_by_role(beats) == {
        "system/generator_cpu_utilization_percentage": 170.0,
        "system/generator_memory_usage_megabytes": 500.0,
        "system/generator_gpu_utilization_percentage": 160,
        "system/generator_gpu_memory_usage_megabytes": 12000.0,
        "system/driver_cpu_utilization_percentage": 5.0,
        "system/driver_memory_usage_megabytes": 100.0,
        "system/reward_cpu_utilization_percentage": 0.0,
        "system/reward_memory_usage_megabytes": 0.0,
    }
