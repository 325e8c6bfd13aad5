"""Verifiers for tests, named by import path in recipes."""

from __future__ import annotations

import json
from typing import Any

from areal_flow.core.types import Score


def reward_length(*, prompt: str, completion: str, answer: str) -> float:
    """A reward that varies even for an untrained policy."""
    return len(completion) % 5 / 4


def reward_short(*, prompt: str, completion: str, answer: str) -> float:
    """Give an untrained policy a gradient: 1 for an empty completion, less for a longer one."""
    return 1.0 / (1.0 + len(completion))


def batched_digits(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
) -> list[float | None]:
    """TRL's signature: the share of digits, and no reward for an empty completion."""
    assert len(prompts) == len(completion_ids) == len(columns["answer"])
    return [sum(map(str.isdigit, t)) / len(t) if t else None for t in completions]


def length_that_raises_at_times(*, prompt: str, completion: str, answer: str) -> float:
    """Fail on some completions, as a user's verifier may."""
    if len(completion) % 7 == 6:
        raise ValueError("no verdict for this length")
    return reward_length(prompt=prompt, completion=completion, answer=answer)


def reward_length_and_say_so(*, prompt: str, completion: str, answer: str) -> Score:
    """The same reward by length, with a message; all but the longest are wrong."""
    reward = reward_length(prompt=prompt, completion=completion, answer=answer)
    return Score(reward, "correct" if reward == 1.0 else "incorrect", message="longer")


def show_columns(completion: str, answer: Any, **columns: Any) -> Score:
    """Always right; the extracted answer is the prompt's row."""
    return Score(1.0, "correct", extracted=json.dumps({**columns, "answer": answer}))


def count_words(text: str, least: int) -> int:
    """A tool that refuses short texts."""
    if len(text) < least:
        raise ValueError(f"expected {least} characters, found {len(text)}")
    return len(text.split())
