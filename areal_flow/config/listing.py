"""Lists all settings of a recipe with type, bounds, default and meaning, from its JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from areal_flow.config.recipe import Recipe

_TYPES = {"string": "text", "integer": "int", "number": "float", "boolean": "bool"}
_SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: str
    """`int`, `float`, `bool`, `text`, `path` or `choice`; `TOML` for lists, tables and the like."""
    rule: str
    """Bounds of a number, such as `>= 0, < 1`."""
    choices: tuple[str, ...]
    default: str
    meaning: str
    """Empty in an array of tables, for a setting with the same meaning as in `[prompts]`."""

    def kind_and_rule(self, choice_format: str = "{}") -> str:
        kind = " or ".join(map(choice_format.format, self.choices)) or self.kind
        return f"{kind}, {self.rule}" if self.rule else kind


@cache
def all_settings() -> tuple[tuple[str, str, list[Setting]], ...]:
    """Return name, meaning and settings of each section; the first, unnamed, is the top level.

    The name of an array of tables is in double brackets, as in TOML.
    """
    schema = Recipe.model_json_schema()
    return tuple(_sections("", {"description": "The run"}, [schema], schema["$defs"]))


@cache
def setting_names(*, in_arrays: bool = True) -> tuple[str, ...]:
    """Return the dotted names of sections and settings, of arrays of tables only if `in_arrays`."""
    names = []
    for section, _, settings in all_settings():
        if in_arrays or not section.startswith("[["):
            names += [section.strip("[]"), *(setting.name for setting in settings)]
    return tuple(dict.fromkeys(name for name in names if name))


def _sections(
    name: str, section: Mapping[str, Any], models: Sequence[Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield a section and its subsections.

    Args:
        models: the schema of the section, or those of its alternatives (algorithms, workflows).
    """
    settings: dict[str, dict[str, Setting]] = {}
    subsections: dict[str, tuple[str, Any, list[Any]]] = {}
    for model in models:
        owner = model["properties"].get("name", {}).get("const", "")
        for key, field in model["properties"].items():
            dotted = f"{name}.{key}".lstrip(".")
            parts = (field, *field.get("oneOf", ()), field.get("items", {}))
            references = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
            if submodels := [definitions[reference] for reference in references]:
                subsections.setdefault(dotted, (dotted, {**submodels[0], **field}, submodels))
            if not submodels or "items" in field:
                settings.setdefault(dotted, {})[owner] = _setting(dotted, field)
    heading = f"[[{name}]]" if "items" in section else name
    yield (
        heading,
        " ".join(section["description"].split()),
        [_merged(by_owner, len(models)) for by_owner in settings.values()],
    )
    for subsection in subsections.values():
        yield from _sections(*subsection, definitions)


def _merged(by_owner: Mapping[str, Setting], num_models: int) -> Setting:
    """Merge a setting of several algorithms or workflows, with the default of each owner."""
    first = next(iter(by_owner.values()))
    choices = dict.fromkeys(choice for setting in by_owner.values() for choice in setting.choices)
    owners: dict[str, list[str]] = {}
    for owner, setting in by_owner.items():
        owners.setdefault(setting.default, []).append(owner)
    default = first.default
    if not first.name.endswith(".name") and (len(owners) > 1 or len(by_owner) < num_models):
        default = "; ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
    return replace(first, choices=tuple(choices), default=default)


def _setting(name: str, field: Mapping[str, Any]) -> Setting:
    # An optional setting has its type in the first alternative.
    plain = {**field, **next(iter(field.get("anyOf", ())), {})}
    choices = plain.get("enum", [plain["const"]] if "const" in plain else ())
    kind = "path" if plain.get("format") == "path" else _TYPES.get(plain.get("type", ""), "TOML")
    default = field.get("default")
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return Setting(
        name=name,
        kind="choice" if choices else kind,
        rule=", ".join(f"{sign} {plain[key]:g}" for key, sign in _SIGNS.items() if key in plain),
        choices=tuple(map(str, choices)),
        default="none" if default is None else text.replace("\n", "\\n") or "empty",
        meaning=" ".join(field.get("description", "").split()),
    )
