"""A batch of completions in, one score each out; a verifier that raises costs only its own."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence

from areal_flow.rewards.protocol import Verifier
from areal_flow.types import Score

logger = logging.getLogger(__name__)


def score_completions(
    verify: Verifier, *, prompt: str, completions: Sequence[str], answer: str
) -> list[Score]:
    """Score completions of one prompt, in order."""
    return [
        _score_one(verify, prompt=prompt, completion=completion, answer=answer)
        for completion in completions
    ]


def _score_one(verify: Verifier, *, prompt: str, completion: str, answer: str) -> Score:
    try:
        verdict = verify(prompt=prompt, completion=completion, answer=answer)
        score = verdict if isinstance(verdict, Score) else _from_reward(float(verdict))
        if score.reward is not None and not math.isfinite(score.reward):
            raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
        return score
    except Exception as error:
        logger.exception("the verifier raised")
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} (at {frame.name}, line {frame.lineno})"
        return Score(None, "error", error=cause)


def _from_reward(reward: float) -> Score:
    return Score(reward, "right" if reward > 0 else "wrong")
