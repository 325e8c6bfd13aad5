"""Settings as command-line options, in `areal-flow settings`, and in the docs.

A setting on the command line is `--SECTION.SETTING VALUE`. Values are validated with the recipe, so
that errors name field, value and rule however a value was given.

    python -m pipelines.cli.settings > docs/settings.md
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter

from areal_flow.config.listing import Setting, all_settings, setting_names
from areal_flow.config.messages import nearest
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import parse_value
from pipelines.console.tables import Report, Table
from pipelines.models import Reference, find_reference


@dataclass(frozen=True, slots=True)
class Folders:
    """Options of all commands, before or after their name: where runs and models are."""

    runs: Path
    registry: str | None
    began: float
    """`monotonic()` when the program began."""

    def find(self, reference: str) -> Reference:
        return find_reference(self.runs, reference, registry=self.registry)


Given = Annotated[Folders, Parameter(parse=False)]
Flag = Annotated[bool, Parameter(negative="")]
Prices = Annotated[tuple[str, ...], Parameter(metavar="[KIND=]PRICE", negative="")]
EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


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
    """Return a TypedDict of all settings by dotted name, for cyclopts."""
    make: Any = TypedDict
    options: dict[str, Any] = {}
    for section, _, settings in all_settings():
        group = Group.create_ordered(section or "Settings of the run")
        if not section.startswith("[["):  # an array of tables is one value
            options |= {setting.name: _option(setting, group) for setting in settings}
    return make("Overrides", options, total=False)


if TYPE_CHECKING:
    Overrides = dict[str, Any]
else:
    Overrides = Annotated[_overrides_type(), Parameter(name="*")]
"""Settings given on the command line, by dotted name."""


def _answers_type() -> Any:
    make: Any = TypedDict
    group = Group.create_ordered("How prompts are answered, instead of the run's settings")
    not_sampling = ("every_steps", "early_stopping_patience", "held_out")
    options = {
        setting.name.rpartition(".")[2]: _option(replace(setting, default="the run's"), group)
        for section, _, settings in all_settings()
        for setting in settings
        if setting.name == "generation.max_new_tokens"
        or (section == "evaluation" and not setting.name.endswith(not_sampling))
    }
    return make("AnswerSettings", options, total=False)


if TYPE_CHECKING:
    AnswerSettings = dict[str, Any]
else:
    AnswerSettings = Annotated[_answers_type(), Parameter(name="*")]
"""Settings given to `evaluate`, without their section."""


def report_settings(requested: str | None) -> Report:
    """Report all settings, or a section with its subsections, or one setting, by dotted name."""
    name = (requested or "").strip("-[]").replace("-", "_")
    sections = [
        (section, meaning, chosen)
        for section, meaning, settings in all_settings()
        if (
            chosen := [
                each
                for each in settings
                if f"{each.name}.".startswith(f"{name}." * bool(name))
                and (each.meaning or each.name == name)
            ]
        )
    ]
    if not sections:
        names = [section.strip("[]") for section, _, _ in all_settings() if section]
        close = nearest(name, setting_names())
        message = f"there is no such section or setting; did you mean {' or '.join(close)}?"
        sections_named = f"expected a setting, or a section: {', '.join(names)}"
        raise ConfigError(f"settings {requested}: {message if close else sections_named}")
    matching = [
        {"section": section, "meaning": meaning, "settings": [asdict(each) for each in settings]}
        for section, meaning, settings in sections
    ]
    return Report({"sections": matching}, [_table(*section) for section in sections])


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
        '`trainer={"learning_rate": 1e-5}`. Both take a name that only one section has without it:',
        "`--learning-rate 1e-5`, `learning_rate=1e-5`; a name that several have is refused, with",
        "them. [Names](guides/names.md) has what TRL, verl and AReaL call them. Made from",
        "`areal_flow/config` by `python -m pipelines.cli.settings > docs/settings.md`.",
    ]
    for section, meaning, settings in all_settings():
        lines += ["", f"## {section or 'The run'}", ""]
        lines += [meaning, ""] if section and not section.startswith("[[") else []
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for setting in (each for each in settings if each.meaning):
            kind = setting.kind_and_rule("`{}`")
            cells = (f"`{setting.name}`", kind, f"`{setting.default}`", setting.meaning)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(settings_page(), end="")
