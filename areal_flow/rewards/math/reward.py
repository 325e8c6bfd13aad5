"""The verifier `math`: mathematical answers, compared as text, as exact numbers, and by algebra."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_flow.core import thinking
from areal_flow.core.types import Score, Verdict
from areal_flow.rewards.math.equality import algebraic_elements, is_same, same_text
from areal_flow.rewards.math.processes import MathPool, MathPoolError
from areal_flow.rewards.math.text import (
    MAX_CHARS,
    excess,
    final_answer,
    reference_text,
    tidied,
    unbraced,
)
from areal_flow.rewards.protocol import RewardInput, overlong

MAX_RAW_CHARS = 4 * MAX_CHARS
"""Of an answer that is not tidied yet."""
MAX_RUNS = 32
"""At a time; most of them wait for a process that does algebra."""
MADE_OF = (Path(thinking.__file__), *sorted(Path(__file__).parent.glob("*.py")))
"""What else decides its verdicts."""


class MathReward:
    """1 for a completion whose final answer equals the row's, else 0."""

    made_of = MADE_OF

    def open(self) -> None:
        self._pool = MathPool()
        self._threads = ThreadPoolExecutor(MAX_RUNS, thread_name_prefix="math")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._pool.close()

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        loop = asyncio.get_running_loop()
        runs = (
            loop.run_in_executor(
                self._threads, judge, self._pool, given.completion, given.answer, given.prompt
            )
            for given in inputs
        )
        return await asyncio.gather(*runs)


def judge(pool: MathPool | None, completion: str, answer: Any, prompt: str = "") -> Score:
    """Return the verdict on a completion.

    Args:
        pool: does algebra; without one an answer that needs it is a `parse_error`.
        completion: what the policy wrote.
        answer: the right answer as its row has it.
        prompt: what the policy was given.
    """
    if unread := overlong(completion):
        return unread
    reference, problem = read_reference(reference_text(answer))
    if problem:
        return _judged("bad_reference", problem)
    marked = final_answer(completion, prompt)
    if marked is None:
        return _judged("parse_error", r"no answer: expected \boxed{} or ####")
    extracted, problem = read_answer(marked)
    if extracted and same_text(extracted, reference):
        return _judged("right", "", marked)
    if problem:
        return _judged("parse_error", problem, marked)
    try:
        verdict, detail = _compared(pool, extracted, reference)
    except MathPoolError as error:
        return Score(None, "infrastructure_error", extracted=marked[:80], error=str(error))
    return _judged(verdict, detail, marked)


def check_reference(pool: MathPool, answer: Any) -> None:
    """Refuse a right answer that no answer could be compared with."""
    reference, problem = read_reference(reference_text(answer))
    if not problem and algebraic_elements(reference):
        verdict, detail = pool.ask(None, reference)
        problem = "" if verdict == "right" else detail or verdict
    if problem:
        raise ValueError(f"the verifier 'math' cannot use the right answer: {problem}")


def read_answer(text: str) -> tuple[str, str]:
    """Return an answer tidied, and what keeps it from being read; empty if nothing does."""
    if len(text) > MAX_RAW_CHARS:
        return "", f"{len(text)} characters, expected an answer of at most {MAX_CHARS}"
    answer = tidied(text)
    problem = excess(answer) if answer else "expected an answer, found none"
    return (answer if problem else unbraced(answer)), problem


read_reference = lru_cache(1024)(read_answer)
"""The completions of a prompt come together."""


def _compared(pool: MathPool | None, answer: str, reference: str) -> tuple[Verdict, str]:
    try:
        return ("right" if is_same(answer, reference, _refuse) else "wrong"), ""
    except _AlgebraNeeded:
        return pool.ask(answer, reference) if pool else ("parse_error", "not a number")


class _AlgebraNeeded(Exception):
    """Text and numbers did not decide."""


def _refuse(answer: str, reference: str) -> bool:
    raise _AlgebraNeeded


def _judged(verdict: Verdict, detail: str, extracted: str = "") -> Score:
    score = float(verdict == "right")
    return Score(score, verdict, extracted=extracted[:80], message=detail)
