"""Functions with TRL's signature, as they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_flow.rewards.batched import BatchedFunctionReward, is_batched
from areal_flow.rewards.protocol import RewardInput, RewardSettings
from areal_flow.rewards.registry import WeightedRewards, load_reward
from areal_flow.rewards.shipping import ship_function
from areal_flow.types import Score

INPUTS = [
    RewardInput("1 + 1 =", "2", "2", {"tag": "a", "level": 1}, (7, 8)),
    RewardInput("1 + 2 =", "44", "3", {"tag": "b"}, (9,)),
]


def scored(function: Callable[..., Any], **settings: Any) -> list[Score]:
    return [*asyncio.run(BatchedFunctionReward(function, **settings).score(INPUTS))]


def test_function_is_given_prompts_completions_and_columns_as_lists() -> None:
    given: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        given.update(columns, prompts=prompts, completions=completions)
        return [1, 0.5]

    assert [score.reward for score in scored(reward)] == [1.0, 0.5]
    assert given == {
        "prompts": ["1 + 1 =", "1 + 2 ="],
        "completions": ["2", "44"],
        "completion_ids": [[7, 8], [9]],
        "answer": ["2", "3"],
        "tag": ["a", "b"],
        "level": [1, None],
    }


def lengths(completions: list[str], completion_ids: list[list[int]], tag: list[str]) -> Any:
    return np.array([len(ids) for ids in completion_ids])


def test_function_may_name_only_what_it_needs() -> None:
    assert [score.reward for score in scored(lengths)] == [2.0, 1.0]


def alone(completion: str, completions: str) -> float:
    return float(completion == completions)


def test_functions_are_told_apart_by_what_they_name() -> None:
    assert is_batched(lengths)
    assert not is_batched(alone), "a row may have a column `completions`"
    assert not is_batched(lambda completion, **columns: 1.0)


def only_short(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 if len(text) < 2 else None for text in completions]


def test_none_is_no_reward_and_counts_for_nothing(tmp_path: Path) -> None:
    name = ship_function(only_short, tmp_path)
    two = WeightedRewards(
        [RewardSettings(verifier=name), RewardSettings(verifier="numeric", weight=0.5)], tmp_path
    )
    first, second = asyncio.run(two.score(INPUTS))
    assert (first.reward, second.reward) == (1.5, 0.0)
    assert [part.reward for part in second.parts] == [None, 0.0]
    assert second.verdict == "wrong"
    alone = WeightedRewards([RewardSettings(verifier=name)], tmp_path)
    _, second = asyncio.run(alone.score(INPUTS))
    assert (second.reward, second.error) == (None, "no verifier gave a reward")


def raises(completions: list[str]) -> list[float]:
    raise ValueError("no such thing")


async def waits(completions: list[str]) -> list[float]:
    await asyncio.sleep(60)
    return []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "ValueError: no such thing (at raises, "),
        (lambda completions: [1.0], "must return a list of 2 rewards, found 1 of them"),
        (lambda completions: None, "must return a list of 2 rewards, found None"),
        (lambda completions, level, missing: [1.0, 1.0], "missing"),
        (lambda completions: time.sleep(60), "within 0.02 s"),
        (waits, "within 0.02 s"),
    ],
)
def test_function_that_fails_has_failed_on_all(function: Callable[..., Any], said: str) -> None:
    for score in scored(function, timeout_s=0.01):
        assert score.reward is None
        assert said in score.error


def test_one_bad_reward_fails_alone() -> None:
    found = scored(lambda completions: [1.0, "much"])
    assert (found[0].reward, found[1].reward) == (1.0, None)
    assert "expected a number" in found[1].error


def test_import_path_may_lead_to_one(tmp_path: Path) -> None:
    found = load_reward(f"{__name__}:only_short", tmp_path)
    assert isinstance(found.reward, BatchedFunctionReward)
