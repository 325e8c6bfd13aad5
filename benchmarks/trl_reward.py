"""The reward of `benchmarks/trl.py` for policies that cannot answer."""

from __future__ import annotations

from typing import Any


def share_of_digits(*, prompt: str, completion: str, answer: Any) -> float:
    """Return a reward that varies even with random weights."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
