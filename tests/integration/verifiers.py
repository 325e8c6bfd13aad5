"""Verifiers for tests, named by import path in recipes."""

from __future__ import annotations

from areal_flow.rewards.numeric import verify_numeric
from areal_flow.types import Score


def reward_length(*, prompt: str, completion: str, answer: str) -> float:
    """Reward that an untrained policy already varies in."""
    return len(completion) % 5 / 4


def numeric_that_raises_at_times(*, prompt: str, completion: str, answer: str) -> Score:
    """Fail on some completions, as a verifier of somebody's may."""
    if len(completion) % 7 == 6:
        raise ValueError("no verdict for this length")
    return verify_numeric(prompt=prompt, completion=completion, answer=answer)
