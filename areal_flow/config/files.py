"""Reads a recipe from TOML with what was given over it, and writes it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from areal_flow.config.messages import explain
from areal_flow.config.recipe import Recipe
from areal_flow.errors import ConfigError
from areal_flow.settings import flatten, merge


def load_recipe(
    path: Path, overrides: dict[str, Any] | None = None, *, spelling: str = "{}"
) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table.

    Args:
        spelling: how the overrides were given, for messages: see `messages`.
    """
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"expected a recipe at {path}, found no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    overrides = overrides or {}
    for section, default in (("algorithm", "decoupled_ppo"), ("workflow", "single_turn")):
        chosen = overrides.get(section, {}).get("name")
        if chosen not in (None, table.get(section, {}).get("name", default)):
            table.pop(section, None)  # the settings of another one
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
        return Recipe.model_validate(merge(table, given))
    except ValidationError as error:
        if given and _is_recipe(table):
            source = ""  # without the overrides all would be well
        message = explain(error, Recipe, source=source, given=flatten(given), spelling=spelling)
        raise ConfigError(message) from None


def _is_recipe(table: dict[str, Any]) -> bool:
    try:
        Recipe.model_validate(table)
    except ValidationError:
        return False
    return True


def dump_recipe(recipe: Recipe) -> str:
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))
