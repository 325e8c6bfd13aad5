"""What a recipe's own table keeps when a user's settings are merged over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_replaced(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's table without the settings that belong only to what overrides replace."""
    return _without_other_prompts(table, overrides)


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


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name)
    return section if isinstance(section, Mapping) else {}
