"""What every reward promises; `tests/contracts/test_rewards.py` holds each implementation to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_flow.settings import Settings
from areal_flow.types import Score


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A name of the registry, an import path `package.module:function`, or a shipped function."""
    weight: float = 1.0
    """What this reward is multiplied by in the sum."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion to be judged.

    Args:
        prompt: the text that the policy was given.
        completion: the text that it produced, without special tokens.
        answer: the right answer.
        metadata: the other columns of the prompt's row: tests, an entry point, anything.
    """

    prompt: str
    completion: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """Judges completions, many at a time. Opened once on each reward worker, and closed there."""

    def open(self) -> None:
        """Acquire what scoring needs: a connection, a model, a sandbox."""
        ...

    def close(self) -> None:
        """Give back what `open` acquired."""
        ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        """Return one score an input, in their order.

        It runs on the worker's event loop: computations belong into `asyncio.to_thread`.

        Raises:
            Exception: counted and stored as an error of every input; none of them gets a reward.
        """
        ...
