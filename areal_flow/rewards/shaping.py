"""Rewards of a completion's form: a match of a pattern, the format, the length.

Patterns run with a time limit and without the interpreter's lock, since a search may take forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import regex

from areal_flow.core.errors import RewardError
from areal_flow.core.types import Score, answer_text
from areal_flow.rewards.protocol import reads_completion

MATCH_LIMIT_S = 1.0


@reads_completion
def verify_regex(*, completion: str, answer: Any, pattern: str) -> Score:
    r"""Compare the last match of a pattern, or of its first group, with the answer, as text.

    Runs of white space count as one space.
    """
    compiled = _compiled(pattern)
    group = 1 if compiled.groups else 0

    def last_match() -> str | None:
        matches = compiled.finditer(completion, timeout=MATCH_LIMIT_S, concurrent=True)
        last = deque(matches, maxlen=1)
        return (last[0].group(group) or "") if last else None

    match = _in_time(last_match)
    if isinstance(match, Score):
        return match
    if match is None:
        return Score(0.0, "parse_error")
    right = " ".join(match.split()) == " ".join(answer_text(answer).split())
    return Score(float(right), "correct" if right else "incorrect", extracted=match[:80])


@reads_completion
def verify_format(*, completion: str, pattern: str) -> Score:
    """Give 1 to a completion that a pattern matches as a whole."""
    compiled = _compiled(pattern)
    match = _in_time(
        lambda: compiled.fullmatch(completion, timeout=MATCH_LIMIT_S, concurrent=True) is not None
    )
    if isinstance(match, Score):
        return match
    return Score(float(match), "correct" if match else "incorrect")


def penalize_length(*, completion_ids: Sequence[int], max_tokens: int, buffer_tokens: int) -> float:
    """Return the soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4, equation 13).

    0 up to `max_tokens - buffer_tokens`, then a line down to -1 at `max_tokens`, and -1 beyond.

    Args:
        completion_ids: the completion's tokens, special ones included.
        max_tokens: L_max.
        buffer_tokens: L_cache, from 1 to `max_tokens`.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise RewardError(
            f"reward 'length': expected 1 <= buffer_tokens <= max_tokens, found {buffer_tokens} "
            f"and {max_tokens}"
        )
    free = max_tokens - buffer_tokens
    return -min(1.0, max(0.0, (len(completion_ids) - free) / buffer_tokens))


def _in_time(search: Callable[[], Any]) -> Any:
    try:
        return search()
    except TimeoutError:
        return Score(0.0, "timeout", error=f"the pattern took longer than {MATCH_LIMIT_S:g} s")


@cache
def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise RewardError(f"expected a regular expression, found {pattern!r}: {error}") from error
