"""The settings of a run: how a recipe is read, validated with overrides, and written.

A component whose interface needs no vendor keeps its section beside it. Unknown keys, wrong types
and impossible combinations fail, naming field, value and rule. The docstring of a field is its
meaning, which `areal-flow train --help` and docs/settings.md show.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config.messages import explain
from areal_flow.config.recipe import EvaluationSettings, Recipe, TrackingSettings
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import flatten, merge

__all__ = [
    "EvaluationSettings",
    "Recipe",
    "TrackingSettings",
    "build_recipe",
    "dump_recipe",
    "load_recipe",
]


MAX_REFUSED = 3
"""The most settings of a recipe that are dropped together to fit another algorithm."""

logger = logging.getLogger(__name__)


def load_recipe(
    path: Path, overrides: dict[str, Any] | None = None, *, spelling: str = "{}"
) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table; messages spell them by `spelling`."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"expected a recipe at {path}, found no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return build_recipe(table, overrides, source=str(path), spelling=spelling)


def build_recipe(
    table: dict[str, Any],
    overrides: dict[str, Any] | None = None,
    *,
    source: str,
    spelling: str = "{}",
) -> Recipe:
    """Validate a nested table with overrides; see `load_recipe`."""
    given = overrides or {}
    try:
        return Recipe.model_validate(merge(without_replaced(table, given), given))
    except ValidationError as error:
        with suppress(ValidationError):
            if given and Recipe.model_validate(table):
                source = ""  # the recipe alone is valid
        message = explain(error, source=source, given=flatten(given), spelling=spelling)
        raise ConfigError(message) from None


def dump_recipe(recipe: Recipe) -> str:
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))


def without_replaced(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's table without settings of what the overrides replace."""
    table = _without_other_prompts(table, overrides)
    table = _for_other_algorithm(table, _section(overrides, "algorithm"))
    workflow, chosen = _section(table, "workflow"), _section(overrides, "workflow").get("name")
    if chosen not in (None, workflow.get("name", "single_turn")):
        _warn_of_dropped(f"workflow.name = {chosen!r}", workflow)
        table = {**table, "workflow": {}}
    return table


def _without_other_prompts(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the recipe's prompts, wherever they are named, if the overrides name others."""
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
    """Drop settings of the recipe's algorithm that have another meaning for the given one.

    A setting is dropped, with a warning, if the new algorithm lacks it or refuses it, or if its
    default differs and the recipe's value is a number (of another scale) or the old algorithm's
    default (which was no choice).
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
