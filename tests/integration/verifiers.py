"""Verifiers for tests, named by import path in recipes."""

from __future__ import annotations


def reward_length(*, prompt: str, completion: str, reference: str) -> float:
    """Reward that an untrained policy already varies in."""
    return len(completion) % 5 / 4
