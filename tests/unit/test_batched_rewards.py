"""Functions with TRL's signature get the arguments that TRL 1.16 passes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_flow.core.types import Score
from areal_flow.log.codec import scored_table
from areal_flow.rewards.functions import (
    BATCH_ARGUMENTS,
    BatchedFunctionReward,
    FunctionReward,
    function_reward,
    is_batched,
)
from areal_flow.rewards.protocol import (
    COMPLETION_ARGUMENTS,
    RewardInput,
    RewardSettings,
    TrainerState,
)
from areal_flow.rewards.registry import WeightedRewards, load_reward
from areal_flow.rewards.shipping import ship_function
from tests.rows import group_table

SCORED = [*("reward", "reward_detail", "reward_parts"), *("verifier", "scored_at", "content_hash")]

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
    state, log_extra, log_metric = (given.pop(name) for name in BATCH_ARGUMENTS[-3:])
    assert (state, callable(log_extra), callable(log_metric)) == (TrainerState(), True, True)
    assert given == {
        "prompts": ["1 + 1 =", "1 + 2 ="],
        "completions": ["2", "44"],
        "completion_ids": [[7, 8], [9]],
        "answer": ["2", "3"],
        "tag": ["a", "b"],
        "level": [1, None],
    }


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]


def first_character(prompts: Any, completions: Any, ground_truth: Any, **kwargs: Any) -> Any:
    contents = [completion[0]["content"] for completion in completions]
    assert [prompt[-1]["content"] for prompt in prompts] == ["1 + 1 ="] * len(prompts)
    assert [completion[0]["role"] for completion in completions] == ["assistant"] * len(prompts)
    return [float(content[0] == t) for content, t in zip(contents, ground_truth, strict=True)]


def test_prompts_of_messages_come_as_messages_and_so_do_completions() -> None:
    row = {"prompt": ASKED, "ground_truth": "2"}
    inputs = [
        RewardInput("<chat>", text, "2", row, (1,), messages=ASKED) for text in ("2", "so 2", "")
    ]
    scores = asyncio.run(BatchedFunctionReward(first_character).score(inputs[:2]))
    assert [score.reward for score in scores] == [1.0, 0.0]
    single = FunctionReward(lambda *, prompt, completion, **columns: float(prompt == "<chat>"))
    (score,) = asyncio.run(single.score(inputs[:1]))
    assert score.reward == 1.0, "a function of one completion is given texts"


def ramped(completions: list[str], trainer_state: TrainerState, **kwargs: Any) -> list[float]:
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def test_trainer_state_says_how_far_training_is() -> None:
    inputs = [replace(given, trainer_state=TrainerState(n, 20)) for n, given in enumerate(INPUTS)]
    scores = asyncio.run(BatchedFunctionReward(ramped).score(inputs))
    assert [score.reward for score in scores] == [0.05, 0.05], "the newest version of the call"


def logs(completions: list[str], log_extra: Any = None, log_metric: Any = None) -> list[float]:
    log_extra("parsed", [text[:1] for text in completions])
    log_metric("format share", 0.25)
    log_metric("format share", 0.75)
    log_metric("undefined", float("nan"))
    return [0.0, 1.0]


def test_output_logged_by_a_function_is_stored_with_each_completion(tmp_path: Path) -> None:
    two = [RewardSettings(verifier=ship_function(logs, tmp_path)), RewardSettings(weight=0.5)]
    scores = asyncio.run(WeightedRewards(two, tmp_path).score(INPUTS))
    assert [score.reward for score in scores] == [0.5, 1.0], "what is logged is no reward"
    assert [score.extra for score in scores] == [{"parsed": "2"}, {"parsed": "4"}]
    for score, numeric in zip(scores, (1.0, 0.0), strict=True):
        _, share, undefined, last = score.parts
        assert (share, undefined) == (("format-share", 0.5), ("undefined", None))
        assert last == ("numeric", numeric)
    table = scored_table(group_table(0, rewards=(0, 0)).drop_columns(SCORED), scores, verifier="v")
    details = [json.loads(text) for text in table["reward_detail"].to_pylist()]
    assert [detail["extra"] for detail in details] == [{"parsed": "2"}, {"parsed": "4"}]


def test_extra_values_are_one_a_completion() -> None:
    def reward(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("parsed", ["only one"])
        return [1.0, 1.0]

    for score in scored(reward):
        assert "log_extra('parsed'): expected 2 values, one a completion, found 1" in score.error


class CallableReward:
    """TRL also takes callable objects, and awaits `async` ones."""

    async def __call__(self, completions: list[str], scale: float = 1.0, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return [scale * len(text) for text in completions]


def test_callable_objects_and_partial_functions_work_as_rewards(tmp_path: Path) -> None:
    for function, rewards in (
        (CallableReward(), [1, 2]),
        (partial(CallableReward(), scale=2), [2, 4]),
    ):
        name = ship_function(function, tmp_path)
        assert name.startswith("shipped:CallableReward@")
        scores = asyncio.run(load_reward(name, tmp_path).reward.score(INPUTS))
        assert [score.reward for score in scores] == rewards, [score.error for score in scores]


def test_a_refusal_lists_each_possible_argument_once() -> None:
    def batched(completions: list[str], tests: list[str]) -> list[float]:
        return []

    def single(completion: str, tests: list[str], prompt: str = "", level: int = 0) -> float:
        return 0.0

    row = {"answer": "2", "level": 1, "prompt": "1 + 1 ="}
    given = [RewardInput("1 + 1 =", "2", "2", row)]
    for reward, own in (
        (BatchedFunctionReward(batched), BATCH_ARGUMENTS),
        (FunctionReward(single), COMPLETION_ARGUMENTS),
    ):
        (score,) = asyncio.run(reward.score(given))
        reason, _, listed = score.error.partition("; it may ask, by name, for ")
        listed, _, _ = listed.partition(" (at ")
        assert reason == "TypeError: the verifier asks for 'tests'"
        assert sorted(listed.split(", ")) == sorted({*own, *row})


def lengths(completions: list[str], completion_ids: list[list[int]], tag: list[str]) -> Any:
    return np.array([len(ids) for ids in completion_ids])


def test_function_may_name_only_what_it_needs() -> None:
    assert [score.reward for score in scored(lengths)] == [2.0, 1.0]


def alone(completion: str, completions: str) -> float:
    return float(completion == completions)


def test_functions_are_distinguished_by_the_names_they_use() -> None:
    assert is_batched(lengths)
    assert not is_batched(alone), "a row may have a column `completions`"
    assert not is_batched(lambda completion, **columns: 1.0)
    assert not is_batched(lambda prompt, answer, **columns: 1.0)


class Overlong:
    """TRL's `get_soft_overlong_punishment` and `get_repetition_penalty_reward` return such ones."""

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [-float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    "function",
    [
        Overlong(),
        lambda completion_ids, **kwargs: [-float(len(ids)) for ids in completion_ids],
        lambda prompts, **kwargs: [-float(len(ids)) for ids in kwargs["completion_ids"]],
        lambda prompts, completion_ids: [-float(len(ids)) for ids in completion_ids],
        lambda tag, **kwargs: [-float(len(ids)) for ids in kwargs["completion_ids"]],
        lambda **kwargs: [-float(len(ids)) for ids in kwargs["completion_ids"]],
    ],
)
def test_functions_of_trl_need_not_name_completions(function: Callable[..., Any]) -> None:
    scores = asyncio.run(function_reward(function, timeout_s=5).score(INPUTS))
    assert [score.reward for score in scores] == [-2.0, -1.0], scores[0].error


def test_columns_called_metadata_and_answer_are_the_rows_own() -> None:
    def reward(completions: Any, metadata: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [float(metadata == ["hard"] and answer == ["because 1 + 1"])]

    row = {"metadata": "hard", "answer": "because 1 + 1", "final_answer": "2"}
    (score,) = asyncio.run(
        BatchedFunctionReward(reward).score([RewardInput("1 + 1 =", "2", "2", row)])
    )
    assert score.reward == 1.0, score.error


def test_trainer_state_has_what_that_of_transformers_has() -> None:
    from transformers import TrainerState as Theirs

    ours, theirs = TrainerState(3, 20), Theirs(global_step=3, max_steps=20)
    for name in vars(theirs):
        assert getattr(ours, name) == getattr(theirs, name), name


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
    assert second.verdict == "incorrect"
    alone = WeightedRewards([RewardSettings(verifier=name)], tmp_path)
    _, second = asyncio.run(alone.score(INPUTS))
    assert (second.reward, second.error) == (None, "no verifier gave a reward")


def raises(completions: list[str]) -> list[float]:
    raise ValueError("no such thing")


async def waits(completions: list[str]) -> list[float]:
    await asyncio.sleep(60)
    return []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "ValueError: no such thing (at raises, "),
        (lambda completions: [1.0], "must return a list of 2 rewards, found 1 of them"),
        (lambda completions: None, "must return a list of 2 rewards, found None"),
        (lambda completions, level, missing: [1.0, 1.0], "asks for 'missing'; it may ask"),
        (lambda completions: time.sleep(60), "within 0.02 s"),
        (waits, "within 0.02 s"),
    ],
)
def test_function_that_fails_has_failed_on_all(function: Callable[..., Any], message: str) -> None:
    for score in scored(function, timeout_s=0.01):
        assert score.reward is None
        assert message in score.error


def test_one_bad_reward_fails_alone() -> None:
    scores = scored(lambda completions: [1.0, "much"])
    assert (scores[0].reward, scores[1].reward) == (1.0, None)
    assert "expected a number" in scores[1].error


def test_import_path_may_lead_to_one(tmp_path: Path) -> None:
    loaded = load_reward(f"{__name__}:only_short", tmp_path)
    assert isinstance(loaded.reward, BatchedFunctionReward)
