"""What a recipe's own table keeps when a user's settings are merged over it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from areal_flow.algorithms.registry import ALGORITHMS

MAX_REFUSED = 3
"""At most so many settings of a recipe can make it unfit for another algorithm together."""

logger = logging.getLogger(__name__)


def without_replaced(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's table without the settings that belong only to what overrides replace."""
    table = _without_other_prompts(table, overrides)
    table = _for_other_algorithm(table, _section(overrides, "algorithm"))
    workflow, chosen = _section(table, "workflow"), _section(overrides, "workflow").get("name")
    if chosen not in (None, workflow.get("name", "single_turn")):
        _warn_of_dropped(f"workflow.name = {chosen!r}", workflow)
        table = {**table, "workflow": {}}
    return table


def _without_other_prompts(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Have prompts that are named over a recipe replace the recipe's prompts, wherever they are."""
    own, given = _section(table, "prompts"), _section(overrides, "prompts")
    replaced: set[str] = set()
    if given.get("source", "file") != "file" or (overrides.get("sources") and "path" in own):
        replaced = {"source", "path", "held_out_path"}
    elif "path" in given:
        replaced = {"source", "path"}
    if not replaced:
        return table
    prompts = {name: value for name, value in own.items() if name not in replaced}
    return {**table, "prompts": prompts, "sources": []}


def _for_other_algorithm(table: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a recipe says of its algorithm as far as it means the same for the one given.

    A setting is dropped, with a warning, if the other algorithm has none of that name, refuses it,
    or has another default for it and the recipe's is a number (of another scale) or its own
    algorithm's default (which was no choice).
    """
    own = _section(table, "algorithm")
    old = ALGORITHMS.get(str(own.get("name", "decoupled_ppo")))
    new = ALGORITHMS.get(str(given.get("name")))
    if old is None or new is None or old is new:
        return table

    def keeps(name: str, value: Any) -> bool:
        before, after = (of.model_fields.get(name) for of in (old, new))
        if before is None or after is None:
            return before is None  # a name that no algorithm has is refused by validation
        is_number = isinstance(value, int | float)
        return before.default == after.default or not (is_number or value == before.default)

    kept = {name: value for name, value in own.items() if name != "name" and keeps(name, value)}
    for left_out in (c for n in range(MAX_REFUSED + 1) for c in combinations(kept, n)):
        remaining = {name: value for name, value in kept.items() if name not in left_out}
        if _is_valid(new, {**remaining, **given}):
            kept = remaining
            break
    dropped = {name: value for name, value in own.items() if name not in {*kept, *given}}
    _warn_of_dropped(f"algorithm.name = {given['name']!r}", dropped)
    return {**table, "algorithm": kept}


def _is_valid(algorithm: type[Any], settings: Mapping[str, Any]) -> bool:
    try:
        algorithm.model_validate(settings)
    except ValidationError:
        return False
    return True


def _warn_of_dropped(setting: str, dropped: Mapping[str, Any]) -> None:
    names = [f"{name} = {value!r}" for name, value in dropped.items() if name != "name"]
    if names:
        logger.warning(
            "ignoring recipe settings that do not apply to %s: %s", setting, ", ".join(names)
        )


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name)
    return section if isinstance(section, Mapping) else {}
