"""A verifier that gives an untrained policy a gradient from its first step on."""

from __future__ import annotations


def reward_short(*, prompt: str, completion: str, answer: str) -> float:
    """Return 1 for an empty completion, less for a longer one."""
    return 1.0 / (1.0 + len(completion))
