"""Verifiers of a final answer: `math`, `numeric` and `exact`.

`math` compares as text, as exact numbers, and by algebra; `numeric` is `math` without algebra, for
references that are a single number; `exact` compares as text alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_flow.core import thinking
from areal_flow.core.thinking import after_thinking
from areal_flow.core.types import Score, Verdict, answer_text
from areal_flow.rewards.math.equality import algebraic_elements, is_same, same_text, value_of
from areal_flow.rewards.math.processes import MathPool, MathPoolError
from areal_flow.rewards.math.quantity import quantity_of
from areal_flow.rewards.math.text import (
    MAX_CHARS,
    excess,
    final_answer,
    marked_text,
    reference_text,
    tidied,
    unbraced,
)
from areal_flow.rewards.protocol import RewardInput, overlong, reads_completion

MAX_RAW_CHARS = 4 * MAX_CHARS
"""Maximum length of an answer before it is tidied."""
MAX_RUNS = 32
"""Completions judged at a time; most of them wait for an algebra process."""
MADE_OF = (Path(thinking.__file__), *sorted(Path(__file__).parent.glob("*.py")))
"""Other code that the verdicts depend on."""


class MathReward:
    """1 for a completion whose final answer equals the reference answer, else 0."""

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
                self._threads, judge, self._pool, item.completion, item.answer, item.prompt
            )
            for item in inputs
        )
        return await asyncio.gather(*runs)


@reads_completion
def verify_numeric(*, prompt: str, completion: str, answer: Any) -> Score:
    """Give the verdict of `math` without algebra; the reference answer is a single number."""
    reference = number_in(answer)
    if reference is None:
        shown = answer_text(answer)[-40:]
        return Score(0.0, "bad_reference", error=f"expected a single number, got {shown!r}")
    return judge(None, completion, reference, prompt)


@reads_completion
def verify_exact(*, prompt: str, completion: str, answer: Any) -> Score:
    """Compare the marked final answer, else all that follows the thinking, as text.

    Runs of white space count as one space. An answer that is not text is compared as JSON.
    """
    reference, text = answer_text(answer), after_thinking(completion, prompt)
    extracted = " ".join((marked_text(text) or text).split())
    is_right = extracted == " ".join((marked_text(reference) or reference).split())
    return Score(float(is_right), "correct" if is_right else "incorrect", extracted=extracted[:80])


vars(verify_numeric)["made_of"] = vars(verify_exact)["made_of"] = MADE_OF


def number_in(answer: Any) -> str | None:
    """Return the only number in a row's answer, without a name; None if there is no single one.

    `12 apples`, `Total = 12` and `#### 12` are 12; `3 and 4, 7` is not a single number.
    """
    return _number_in(answer if isinstance(answer, str) else reference_text(answer))


@lru_cache(1024)
def _number_in(answer: str) -> str | None:
    text, problem = read_answer(final_answer(answer, is_reference=True) or "")
    number = value_of(text)
    return number if quantity_of(number) and not problem else None


def judge(pool: MathPool | None, completion: str, answer: Any, prompt: str = "") -> Score:
    """Return the verdict on a completion.

    Args:
        pool: does algebra; without it an answer that needs algebra is a `parse_error`.
        completion: the policy's text.
        answer: the reference answer, as in its row.
        prompt: the policy's prompt.
    """
    if score := overlong(completion):
        return score
    reference, problem = read_reference(reference_text(answer))
    if problem:
        return _judged("bad_reference", problem)
    marked = final_answer(completion, prompt)
    if marked is None:
        return _judged("parse_error", r"no answer: expected \boxed{} or ####")
    extracted, problem = read_answer(marked)
    if extracted and same_text(extracted, reference):
        return _judged("correct", "", marked)
    if problem:
        return _judged("parse_error", problem, marked)
    try:
        verdict, detail = _compared(pool, extracted, reference)
    except MathPoolError as error:
        return Score(None, "infrastructure_error", extracted=marked[:80], error=str(error))
    return _judged(verdict, detail, marked)


def check_reference(pool: MathPool, answer: Any) -> None:
    """Refuse a reference answer with which no answer can be compared."""
    reference, problem = read_reference(reference_text(answer))
    if not problem and algebraic_elements(reference):
        verdict, detail = pool.ask(None, reference)
        problem = "" if verdict == "correct" else detail or verdict
    if problem:
        raise ValueError(f"the verifier 'math' cannot use the right answer: {problem}")


def read_answer(text: str) -> tuple[str, str]:
    """Return an answer tidied, and why it cannot be read; empty if it can."""
    if len(text) > MAX_RAW_CHARS:
        return "", f"{len(text)} characters, expected an answer of at most {MAX_CHARS}"
    answer = tidied(text)
    problem = excess(answer) if answer else "expected an answer, found none"
    return (answer if problem else unbraced(answer)), problem


read_reference = lru_cache(1024)(read_answer)
"""Cached: the completions of a prompt are judged together."""


def _compared(pool: MathPool | None, answer: str, reference: str) -> tuple[Verdict, str]:
    try:
        return ("correct" if is_same(answer, reference, _need_algebra) else "incorrect"), ""
    except _AlgebraNeeded:
        return pool.ask(answer, reference) if pool else ("parse_error", "not a number")


class _AlgebraNeeded(Exception):
    """Comparing text and numbers did not decide."""


def _need_algebra(answer: str, reference: str) -> bool:
    raise _AlgebraNeeded


def _judged(verdict: Verdict, detail: str, extracted: str = "") -> Score:
    score = float(verdict == "correct")
    return Score(score, verdict, extracted=extracted[:80], message=detail)
