"""The contract of every reward: the shipped ones, and a fake that must be opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.types import Score
from areal_flow.rewards.code.reward import CodeReward
from areal_flow.rewards.functions import FunctionReward, function_reward
from areal_flow.rewards.judge import JudgeReward
from areal_flow.rewards.protocol import Reward, RewardInput
from areal_flow.rewards.reasoning_gym import verify_reasoning_gym
from areal_flow.rewards.registry import REWARDS, load_reward
from areal_flow.rewards.shipping import ship_function
from areal_flow.sandboxes.pool import choose_tier
from areal_flow.sandboxes.run import SandboxError
from tests.judges import running_judge
from tests.reward_models import write_reward_model


class CountingReward:
    """A reward that scores only while it is open."""

    def __init__(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if not self.is_open:
            raise RuntimeError("the reward is not open")
        return [Score(float(given.completion == given.answer), "correct") for given in inputs]


async def judged_in_time(*, completion: str, answer: str) -> float:
    await asyncio.sleep(0.001 * len(completion))
    return float(completion == answer)


def shipped(directory: Path) -> Reward:
    name = ship_function(lambda completion, answer: completion == answer, directory)
    return load_reward(name, directory).reward


def of_chain_sum(*, prompt: str, completion: str, answer: str) -> Score:
    pytest.importorskip("reasoning_gym")
    metadata = {"source_dataset": "chain_sum"}
    return verify_reasoning_gym(
        prompt=prompt, completion=completion, answer=answer, metadata=metadata
    )


def judged_together(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert len(prompts) == len(completions)
    return [
        float(given == answer) for given, answer in zip(completions, columns["answer"], strict=True)
    ]


class ProgramsThatPrint:
    """The verifier `code` with programs that print an answer."""

    def __init__(self) -> None:
        self._reward = CodeReward()

    def open(self) -> None:
        self._reward.open()

    def close(self) -> None:
        self._reward.close()

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        return await self._reward.score([self._as_program(given) for given in inputs])

    def _as_program(self, given: RewardInput) -> RewardInput:
        tests = [{"input": "", "output": given.answer}]
        source = f"print({given.completion})"
        return RewardInput(given.prompt, source, "", {"mode": "stdin", "tests": tests})


class AskedJudge:
    """The reward `judge` with a service that runs while the reward is open."""

    def open(self) -> None:
        self._serving = running_judge(lambda request: request["completion"] == request["answer"])
        self._reward = JudgeReward(url=self._serving.__enter__())
        self._reward.open()

    def close(self) -> None:
        self._serving.__exit__(None, None, None)

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        return await self._reward.score(inputs)


class ScoredByModel:
    """The reward `reward_model`: right if a completion scores as much as the right answer."""

    def __init__(self, directory: Path) -> None:
        settings = {"path": str(write_reward_model(directory / "model"))}
        self._reward = load_reward("reward_model", directory, settings=settings).reward
        self.open, self.close = self._reward.open, self._reward.close

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        right = [RewardInput(given.prompt, given.answer, "") for given in inputs]
        scores = await self._reward.score([*inputs, *right])
        rewards = [score.reward or 0.0 for score in scores]
        both = zip(rewards[: len(inputs)], rewards[len(inputs) :], strict=True)
        return [Score(float(abs(actual - target) < 1e-4)) for actual, target in both]


SUBJECTS: dict[str, Callable[[Path], Reward]] = {
    **{
        name: lambda path, name=name: load_reward(name, path).reward
        for name in REWARDS
        if name in ("numeric", "exact")
    },
    "code": lambda _: ProgramsThatPrint(),
    "regex": lambda path: load_reward("regex", path, settings={"pattern": r"\d+"}).reward,
    "format": lambda path: load_reward("format", path, settings={"pattern": "2"}).reward,
    "judge": lambda _: AskedJudge(),
    "reward_model": ScoredByModel,
    "reasoning_gym": lambda _: FunctionReward(of_chain_sum),
    "class": lambda _: CountingReward(),
    "async function": lambda _: FunctionReward(judged_in_time),
    "batched function": lambda _: function_reward(judged_together, timeout_s=60),
    "shipped": shipped,
}


@pytest.fixture(params=SUBJECTS)
def reward(request: pytest.FixtureRequest, tmp_path: Path) -> Reward:
    if request.param == "code":
        try:
            choose_tier()
        except SandboxError as error:
            pytest.skip(str(error))
    return SUBJECTS[request.param](tmp_path)


def inputs_of(*completions: str) -> list[RewardInput]:
    return [RewardInput("1 + 1 =", completion, "2") for completion in completions]


def test_scores_come_in_the_order_of_the_inputs(reward: Reward) -> None:
    reward.open()
    scores = asyncio.run(reward.score(inputs_of("3", "2", "44444", "2", "5")))
    reward.close()
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_batches_that_overlap_do_not_disturb_each_other(reward: Reward) -> None:
    async def both() -> list[Sequence[Score]]:
        return await asyncio.gather(
            reward.score(inputs_of("2", "3")), reward.score(inputs_of("4", "2", "2"))
        )

    reward.open()
    batches = asyncio.run(both())
    reward.close()
    assert [[score.reward for score in batch] for batch in batches] == [[1.0, 0.0], [0.0, 1.0, 1.0]]


def test_no_input_is_no_score(reward: Reward) -> None:
    reward.open()
    assert list(asyncio.run(reward.score([]))) == []
    reward.close()


def test_reward_can_be_opened_again_after_it_was_closed(reward: Reward) -> None:
    for _ in range(2):
        reward.open()
        (score,) = asyncio.run(reward.score(inputs_of("2")))
        assert score.reward == 1.0
        reward.close()
