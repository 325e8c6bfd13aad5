"""Every setting of a recipe with its type, default and meaning: for `--help` and docs/settings.md.

A setting on the command line is `--SECTION.SETTING VALUE`. Values are validated with the recipe
that they change, so that errors name field, value and rule however a value was given.

    python -m pipelines.cli.settings > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

from cyclopts import Group, Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from areal_flow.config import Recipe, parse_value
from areal_flow.config_errors import sections

_TYPES: dict[Any, str] = {str: "text", Path: "path", int: "int", float: "float", bool: "bool"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class Folders:
    """What all commands share, given before or after their name: where runs and models are."""

    runs: Path
    registry: str | None
    began: float
    """`monotonic()` when the program began."""


Given = Annotated[Folders, Parameter(parse=False)]
Flag = Annotated[bool, Parameter(negative="")]
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a recipe or of one of its sections."""

    name: str
    kind: str
    """`int`, `float`, `bool`, `text`, `path`, `choice` or, of anything nested, `TOML`."""
    rule: str
    choices: tuple[str, ...]
    default: str
    meaning: str


def settings_of(model: type[BaseModel], section: str = "") -> Iterator[Setting]:
    """Yield the settings of one section, in the order of their declaration."""
    for name, field in model.model_fields.items():
        if not sections(field.annotation):
            yield _setting(f"{section}{name}", field)


def all_settings(recipe: type[BaseModel] = Recipe) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield each section's name, meaning and settings; a recipe's own first, under no name.

    A section that may be there several times has its name in brackets, as in TOML.
    """
    yield "", "The run", list(settings_of(recipe))
    for name, field in recipe.model_fields.items():
        found: dict[str, Setting] = {}
        tables = get_args(field.annotation)[:1] if get_origin(field.annotation) is tuple else ()
        for model in sections(tables[0] if tables else field.annotation):
            for setting in settings_of(model, f"{name}."):
                known = found.setdefault(setting.name, setting)
                choices = dict.fromkeys((*known.choices, *setting.choices))
                found[setting.name] = replace(known, choices=tuple(choices))
        if found:
            heading = f"[[{name}]]" if tables else name
            yield heading, field.description or "", list(found.values())


def _setting(name: str, field: FieldInfo) -> Setting:
    options = [part for part in get_args(field.annotation) if part is not type(None)]
    literal = get_origin(field.annotation) is Literal
    plain = options[0] if len(options) == 1 and not literal else field.annotation
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        default = [table.model_dump(mode="json") for table in default]
    bounds = (
        f"{sign} {getattr(rule, attribute):g}"
        for rule in field.metadata
        for attribute, sign in _SIGNS.items()
        if getattr(rule, attribute, None) is not None
    )
    return Setting(
        name=name,
        kind="choice" if literal else _TYPES.get(plain, "TOML"),
        rule=", ".join(bounds),
        choices=tuple(map(str, options)) if literal else (),
        default="none" if default is None else "empty" if default == "" else _text(default),
        meaning=" ".join((field.description or "").split()),
    )


def _text(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", "\\n")


def _option(setting: Setting, group: Group) -> Any:
    rule = f"[{setting.rule}] " if setting.rule else ""
    parameter = Parameter(
        help=f"{setting.meaning} {rule}[default: {setting.default}]",
        metavar=setting.kind.upper(),
        choices=setting.choices or None,
        converter=_parse_text if setting.kind in ("text", "path", "choice") else _parse_toml,
        group=group,
        allow_leading_hyphen=True,
        n_tokens=1,
        allow_repeating=True,
    )
    return Annotated[Any, parameter]


def _parse_text(hint: Any, tokens: Sequence[Any]) -> str:
    return str(tokens[-1].value)


def _parse_toml(hint: Any, tokens: Sequence[Any]) -> Any:
    return parse_value(tokens[-1].value)


def _overrides_type() -> Any:
    """Return the type of a nested table of settings, as the command line's grammar reads it."""
    make: Any = TypedDict
    fields: dict[str, Any] = {}
    for section, _, settings in all_settings():
        if section.startswith("[["):
            continue  # given as one value, an array of tables
        group = Group.create_ordered(section or "Settings of the run")
        options = {setting.name.rpartition(".")[2]: _option(setting, group) for setting in settings}
        fields |= {section: make(section, options, total=False)} if section else options
    return make("Overrides", fields, total=False)


if TYPE_CHECKING:
    Overrides = dict[str, Any]
else:
    Overrides = Annotated[_overrides_type(), Parameter(name="*")]
"""Settings given on the command line, as a nested table: only those that were given."""


def settings_page() -> str:
    """Return docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Everything that a recipe may say, with its default. On the command line each is an option",
        "of its dotted name, `--trainer.learning-rate 1e-5`; in Python, a keyword of its section,",
        '`trainer={"learning_rate": 1e-5}`. Made from `areal_flow/config.py` by',
        "`python -m pipelines.cli.settings > docs/settings.md`.",
    ]
    for section, meaning, settings in all_settings():
        lines += ["", f"## {section or 'The run'}", ""]
        lines += [meaning, ""] if section else []
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for setting in settings:
            kind = " or ".join(f"`{choice}`" for choice in setting.choices) or setting.kind
            rule = f", {setting.rule}" if setting.rule else ""
            cells = (f"`{setting.name}`", f"{kind}{rule}", f"`{setting.default}`", setting.meaning)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(settings_page(), end="")
