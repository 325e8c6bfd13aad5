"""Refuses files for the rows in them that will not do: the first ten are named at once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from areal_flow.errors import PromptError

MAX_NAMED = 10
_ORIGIN = re.compile(r"(?P<file>.*?), (?:line|row) (?P<number>\d+): ", re.DOTALL)


def refuse_bad_rows(errors: Iterable[str], *, advice: str = "") -> None:
    """End a preparation that found bad rows.

    Args:
        errors: what is wrong with each, from its file and line on, in any order.
        advice: what to do other than to mend them.

    Raises:
        PromptError: there is one; names the first ten, in the order of the file.
    """
    ordered = sorted(dict.fromkeys(errors), key=_place)
    if not ordered:
        return
    if len(ordered) == 1:
        raise PromptError(f"{ordered[0]}. Mend it{advice}")
    first = "the first ten" if len(ordered) > MAX_NAMED else "these"
    named = "".join(f"\n  {error}" for error in ordered[:MAX_NAMED])
    raise PromptError(f"{len(ordered)} rows are bad, {first}:{named}\nMend them{advice}")


def _place(error: str) -> tuple[str, int]:
    origin = _ORIGIN.match(error)
    return (origin["file"], int(origin["number"])) if origin else ("", 0)
