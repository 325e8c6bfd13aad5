"""A final answer, compared as a number or as text: arithmetic, GSM8K, short answers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from areal_flow.core.thinking import after_thinking
from areal_flow.core.types import Score, answer_text
from areal_flow.rewards.math.equality import value_of
from areal_flow.rewards.math.quantity import quantity_of
from areal_flow.rewards.math.reward import MADE_OF, judge, read_answer
from areal_flow.rewards.math.text import final_answer, marked_text, reference_text
from areal_flow.rewards.protocol import reads_completion


@reads_completion
def verify_numeric(*, prompt: str, completion: str, answer: Any) -> Score:
    """Give the verdict of `math` without its algebra; the right answer is a single number."""
    reference = number_in(answer)
    if reference is None:
        shown = answer_text(answer)[-40:]
        return Score(0.0, "bad_reference", error=f"expected a single number, got {shown!r}")
    return judge(None, completion, reference, prompt)


@reads_completion
def verify_exact(*, prompt: str, completion: str, answer: Any) -> Score:
    """Compare the marked final answer, else all that follows the thinking, as text.

    Runs of white space count as one space. An answer that is no text is compared as JSON.
    """
    right, text = answer_text(answer), after_thinking(completion, prompt)
    extracted = " ".join((marked_text(text) or text).split())
    is_right = extracted == " ".join((marked_text(right) or right).split())
    return Score(float(is_right), "right" if is_right else "wrong", extracted=extracted[:80])


def number_in(answer: Any) -> str | None:
    """Return the only number in what a row's answer commits to, without a name; else None.

    `12 apples`, `Total = 12` and `#### 12` are 12; `3 and 4, 7` is no single number.
    """
    return _number_in(answer if isinstance(answer, str) else reference_text(answer))


@lru_cache(1024)
def _number_in(answer: str) -> str | None:
    text, problem = read_answer(final_answer(answer, is_reference=True) or "")
    number = value_of(text)
    return number if quantity_of(number) and not problem else None


vars(verify_numeric)["made_of"] = MADE_OF
vars(verify_exact)["made_of"] = MADE_OF
