"""The settings of a recipe, each with its type, default and meaning, and how a recipe is read.

A component whose interface needs no vendor keeps its section beside it. Unknown keys, wrong types
and impossible combinations fail, naming field, value and rule. The line under a field is its
meaning, which `areal-flow train --help` and docs/settings.md show.
"""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from areal_flow.config.messages import explain
from areal_flow.config.overrides import without_replaced
from areal_flow.config.recipe import Recipe
from areal_flow.config.sections import EvaluationSettings, TrackingSettings
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


def load_recipe(
    path: Path, overrides: dict[str, Any] | None = None, *, spelling: str = "{}"
) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table, which messages name by `spelling`."""
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
                source = ""  # without the overrides all would be well
        message = explain(error, source=source, given=flatten(given), spelling=spelling)
        raise ConfigError(message) from None


def dump_recipe(recipe: Recipe) -> str:
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))
