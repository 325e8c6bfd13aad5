"""What all validated settings have in common: their base, tables of them by dotted name, and the
code that a setting names as `package.module:function`.

It does not import any component; a component keeps its own settings beside it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import ArealFlowError

AUTO: dict[str, JsonValue] = {"default": "auto"}
"""The schema of a setting that a recipe which leaves it out, or sets "auto", gets a value for."""


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


def search_here_last() -> None:
    """Find modules in the working directory, none of which shadows an installed one."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def import_function(
    path: str, *, setting: str, error: type[ArealFlowError], built_in: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function at an import path; `built_in` are other names that a message lists."""
    module_name, colon, attribute = path.partition(":")
    if not colon:
        names = f"one of {', '.join(sorted(built_in))} or " if built_in else ""
        raise error(
            f"{setting} = {path!r}: expected {names}an import path such as "
            "'my_package.my_module:my_function'"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as cause:
        raise error(f"{setting} = {path!r} cannot be imported: {cause}") from cause
    if not callable(function):
        raise error(f"{setting} = {path!r} is not callable")
    return function  # type: ignore[no-any-return]


def code_hash(code: Any) -> str:
    """Return the hash of the module that defines a function or a class: alike in all processes.

    A class may name other files of code in `made_of`. Where there is no source, as of a compiled
    module, a function's byte code stands for it.
    """
    try:
        text = inspect.getsource(inspect.getmodule(code) or code)
    except (OSError, TypeError):
        compiled = getattr(code, "__code__", None)
        text = _compiled(compiled) if compiled else f"{code.__module__}:{code.__qualname__}"
    others = (path.read_text() for path in getattr(code, "made_of", ()))
    return text_hash("\n".join((text, *others)))


def text_hash(text: str) -> str:
    """Return what identifies a text: 12 hexadecimal digits."""
    return sha256_hex(text, 12)


def source_file(code: Any) -> str:
    try:
        return inspect.getsourcefile(code) or ""
    except TypeError:
        return ""


def _compiled(code: CodeType) -> str:
    constants = [_compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
