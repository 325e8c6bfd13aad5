"""What all validated settings have in common: their base, and tables of them by dotted name.

It refuses to know any component; a component keeps its own settings beside it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """Base of every section: frozen, closed to unknown keys, and without silent conversions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def require(holds: bool, rule: str) -> None:
    """Refuse settings that do not fit together, inside a validator."""
    if not holds:
        raise ValueError(rule)


def unnamed_is(name: str) -> BeforeValidator:
    """Return what gives a table that names none of several settings models the name of one."""
    return BeforeValidator(lambda given: {"name": name, **given} if type(given) is dict else given)


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn settings by dotted name, `{"trainer.learning_rate": 1e-5}`, into a nested table."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        inner = nest(value) if isinstance(value, Mapping) else value
        for key in reversed(name.split(".")):
            inner = {key: inner}
        table = merge(table, inner)
    return table


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn a nested table into settings by dotted name: the reverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Turn `SECTION.SETTING=VALUE` texts into a nested table."""
    pairs = (text.partition("=") for text in texts)
    return nest({name.replace("-", "_"): parse_value(value) for name, _, value in pairs})


def parse_value(text: str) -> Any:
    """Return a TOML value, or the text as it is: validation says what it must be."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a nested table with another one's values where it has any."""
    deeper = {
        key: merge(base[key], value)
        for key, value in over.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **over, **deeper}
