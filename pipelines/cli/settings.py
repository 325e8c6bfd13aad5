"""Every setting of a recipe with type, default and meaning: in `--help`, `settings` and the docs.

A setting on the command line is `--SECTION.SETTING VALUE`. Values are validated with the recipe
that they change, so that errors name field, value and rule however a value was given.

    python -m pipelines.cli.settings > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter

from areal_flow.config import Recipe
from areal_flow.config.messages import nearest
from areal_flow.errors import ConfigError
from areal_flow.settings import parse_value
from pipelines.console.tables import Report, Table
from pipelines.references import Reference, find_reference

_KINDS = {"string": "text", "integer": "int", "number": "float", "boolean": "bool"}
_SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@dataclass(frozen=True, slots=True)
class Folders:
    """What all commands share, given before or after their name: where runs and models are."""

    runs: Path
    registry: str | None
    began: float
    """`monotonic()` when the program began."""

    def find(self, reference: str) -> Reference:
        return find_reference(self.runs, reference, registry=self.registry)


Given = Annotated[Folders, Parameter(parse=False)]
Flag = Annotated[bool, Parameter(negative="")]
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: str
    """`int`, `float`, `bool`, `text`, `path`, `choice` or, of anything nested, `TOML`."""
    rule: str
    choices: tuple[str, ...]
    default: str
    meaning: str

    def kind_and_rule(self, choice: str = "{}") -> str:
        kind = " or ".join(map(choice.format, self.choices)) or self.kind
        return f"{kind}, {self.rule}" if self.rule else kind


def all_settings() -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield each section's name, meaning and settings; a recipe's own first, under no name.

    A section that may be there several times has its name in brackets, as in TOML.
    """
    schema = Recipe.model_json_schema()
    yield from _sections("", {"description": "The run"}, [schema], schema["$defs"])


def _sections(
    name: str, section: Mapping[str, Any], models: Sequence[Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield a section, which is of one of some models, and the sections within it."""
    settings: dict[str, Setting] = {}
    within: list[tuple[str, Any, list[Any]]] = []
    for key, field in chain.from_iterable(model["properties"].items() for model in models):
        dotted = f"{name}.{key}".lstrip(".")
        parts = (field, *field.get("oneOf", ()), field.get("items", {}))
        references = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
        if held := [definitions[reference] for reference in references]:
            within.append((dotted, {**held[0], **field}, held))
        if not held or "items" in field:
            setting = _setting(dotted, field)
            known = settings.setdefault(dotted, setting)
            choices = dict.fromkeys((*known.choices, *setting.choices))
            settings[dotted] = replace(known, choices=tuple(choices))
    heading = f"[[{name}]]" if "items" in section else name
    yield heading, " ".join(section["description"].split()), list(settings.values())
    for each in within:
        yield from _sections(*each, definitions)


def _setting(name: str, field: Mapping[str, Any]) -> Setting:
    plain = {**field, **next(iter(field.get("anyOf", ())), {})}
    choices = plain.get("enum", [plain["const"]] if "const" in plain else ())
    kind = "path" if plain.get("format") == "path" else _KINDS.get(plain.get("type", ""), "TOML")
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


def _option(setting: Setting, group: Group) -> Any:
    rule = f"[{setting.rule}] " if setting.rule else ""
    parse = str if setting.kind in ("text", "path", "choice") else parse_value
    parameter = Parameter(
        help=f"{setting.meaning} {rule}[default: `{setting.default}`]",
        metavar=setting.kind.upper(),
        choices=setting.choices or None,
        converter=lambda _, tokens: parse(tokens[-1].value),
        group=group,
        allow_leading_hyphen=True,
        n_tokens=1,
        allow_repeating=True,
    )
    return Annotated[Any, parameter]


def _overrides_type() -> Any:
    """Return the type of settings by dotted name, as the command line's grammar reads it."""
    make: Any = TypedDict
    options: dict[str, Any] = {}
    for section, _, settings in all_settings():
        group = Group.create_ordered(section or "Settings of the run")
        if not section.startswith("[["):  # those are given as one value, an array of tables
            options |= {setting.name: _option(setting, group) for setting in settings}
    return make("Overrides", options, total=False)


if TYPE_CHECKING:
    Overrides = dict[str, Any]
else:
    Overrides = Annotated[_overrides_type(), Parameter(name="*")]
"""Settings given on the command line, by their dotted names: only those that were given."""


def _answers_type() -> Any:
    make: Any = TypedDict
    group = Group.create_ordered("How prompts are answered, instead of the run's settings")
    others = ("every_steps", "stop_after_plateau", "held_out")
    options = {
        setting.name.rpartition(".")[2]: _option(replace(setting, default="the run's"), group)
        for section, _, settings in all_settings()
        for setting in settings
        if setting.name == "generation.max_new_tokens"
        or (section == "evaluation" and not setting.name.endswith(others))
    }
    return make("AnswerSettings", options, total=False)


if TYPE_CHECKING:
    AnswerSettings = dict[str, Any]
else:
    AnswerSettings = Annotated[_answers_type(), Parameter(name="*")]
"""Settings that `evaluate` takes without their section: only those that were given."""


def report_settings(wanted: str | None) -> Report:
    """Report all settings, those of a section and of the sections within it, or one setting.

    Args:
        wanted: a section or a setting by its dotted name, as in a recipe or on the command line.
    """
    name, known = (wanted or "").strip("-[]").replace("-", "_"), [*all_settings()]
    sections = [
        (section, meaning, chosen)
        for section, meaning, settings in known
        if (chosen := [s for s in settings if f"{s.name}.".startswith(f"{name}." * bool(name))])
    ]
    if not sections:
        names = [section.strip("[]") for section, _, _ in known if section]
        close = nearest(name, [*names, *(s.name for _, _, settings in known for s in settings)])
        said = f"there is no such section or setting; did you mean {' or '.join(close)}?"
        sections_named = f"expected a setting, or a section: {', '.join(names)}"
        raise ConfigError(f"settings {wanted}: {said if close else sections_named}")
    found = [
        {"section": section, "meaning": meaning, "settings": [asdict(each) for each in settings]}
        for section, meaning, settings in sections
    ]
    return Report({"sections": found}, [_table(*section) for section in sections])


def _table(section: str, meaning: str, settings: list[Setting]) -> Table:
    rows = [
        {
            "setting": setting.name.rpartition(".")[2],
            "type": setting.kind_and_rule(),
            "default": setting.default,
            "meaning": setting.meaning,
        }
        for setting in settings
    ]
    heading = section if section.startswith("[") or not section else f"[{section}]"
    return Table(rows, f"{heading} {meaning}".strip(), prose=("type", "default", "meaning"))


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Everything that a recipe may say, with its default. On the command line each is an option",
        "of its dotted name, `--trainer.learning-rate 1e-5`; in Python, a keyword of its section,",
        '`trainer={"learning_rate": 1e-5}`. Made from `areal_flow/config` by',
        "`python -m pipelines.cli.settings > docs/settings.md`.",
    ]
    for section, meaning, settings in all_settings():
        lines += ["", f"## {section or 'The run'}", ""]
        lines += [meaning, ""] if section else []
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for setting in settings:
            kind = setting.kind_and_rule("`{}`")
            cells = (f"`{setting.name}`", kind, f"`{setting.default}`", setting.meaning)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(settings_page(), end="")
