"""All rewards of a recipe as one: their weighted sum, with each part beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from areal_flow.config import RewardSettings
from areal_flow.rewards.calls import FAILURES
from areal_flow.rewards.function import error_score, score_of
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import NamedReward, load_reward
from areal_flow.types import RewardPart, Score


class WeightedRewards:
    """A `Reward` that is the sum of others, each times its weight."""

    def __init__(self, settings: Sequence[RewardSettings], directory: Path) -> None:
        """Load each reward by its name; see `load_reward`.

        Raises:
            RewardError: one of them cannot be loaded.
        """
        self._parts = [
            load_reward(chosen.verifier, directory, timeout_s=chosen.timeout_s)
            for chosen in settings
        ]
        self._weights = [chosen.weight for chosen in settings]
        self._opened = ExitStack()

    @property
    def identity(self) -> str:
        """Name and hash of the code of each reward, with its weight unless that is 1."""
        return " + ".join(
            part.identity if weight == 1 else f"{weight:g}*{part.identity}"
            for part, weight in zip(self._parts, self._weights, strict=True)
        )

    def open(self) -> None:
        """Open each reward; if one cannot be opened, those before it are closed again."""
        with ExitStack() as opened:
            for part in self._parts:
                part.reward.open()
                opened.callback(part.reward.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()
        FAILURES.sum_up()

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        columns = await asyncio.gather(*(_scores(part, inputs) for part in self._parts))
        return [self._sum(scores) for scores in zip(*columns, strict=True)]

    def _sum(self, scores: Sequence[Score]) -> Score:
        """Return the sum; verdict and extracted answer are those of the first reward listed."""
        parts = tuple(
            RewardPart(part.name, score.reward)
            for part, score in zip(self._parts, scores, strict=True)
        )
        for score in scores:
            if score.reward is None:
                return Score(None, "error", error=score.error, parts=parts)
        rewards = [score.reward or 0.0 for score in scores]
        total = sum(w * r for w, r in zip(self._weights, rewards, strict=True))
        message = next((score.message for score in scores if score.message), "")
        first = scores[0]
        return Score(total, first.verdict, first.extracted, message=message, parts=parts)


async def _scores(part: NamedReward, inputs: Sequence[RewardInput]) -> Sequence[Score]:
    """Return one score an input; a reward that raises, or returns too few, scores none of them."""
    try:
        scores = [score_of(score) for score in await part.reward.score(inputs)]
        if len(scores) != len(inputs):
            raise ValueError(
                f"reward {part.name!r} returned {len(scores)} scores, expected {len(inputs)}"
            )
        return scores
    except Exception as error:  # noqa: BLE001 - counted, and stored with each completion
        return [error_score(error)] * len(inputs)
