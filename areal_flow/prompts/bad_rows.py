"""Refuses files for the rows in them that will not do: the first ten are named at once."""

from __future__ import annotations

from collections.abc import Mapping

from areal_flow.errors import PromptError
from areal_flow.prompts.files import Place

MAX_NAMED = 10


def refuse_bad_rows(errors: Mapping[Place, PromptError], *, advice: str = "") -> None:
    """End a preparation that found bad rows.

    Args:
        errors: what is wrong with each, in any order.
        advice: what to do other than to mend them.
    """
    ordered = [errors[place] for place in sorted(errors)]
    if not ordered:
        return
    if len(ordered) == 1:
        raise PromptError(f"{ordered[0]}. Mend it{advice}")
    first = "the first ten" if len(ordered) > MAX_NAMED else "these"
    named = "".join(f"\n  {error}" for error in ordered[:MAX_NAMED])
    raise PromptError(f"{len(ordered)} rows are bad, {first}:{named}\nMend them{advice}")
