"""`areal-flow import`, and the page of what TRL, verl and AReaL call a setting.

python -m pipelines.cli.importing > docs/guides/names.md
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from areal_flow.config.other_tools import TOOLS, Counterpart, counterparts
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import nest
from pipelines.console.tables import Report, Table

if TYPE_CHECKING:
    from pipelines.importing.recipe import Import

VERSIONS = {"trl": "TRL 1.16", "verl": "verl 0.10", "areal": "AReaL 1.0.4"}


@Parameter(name="import")
def import_(
    file: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=False)],
    to: Path | None = None,
) -> Report:
    """Write the configuration of a run in TRL, verl or AReaL as a recipe.

    Args:
        file: YAML of verl or AReaL, a script of TRL with GRPOConfig(...), which is read and not
            executed, or a shell script that starts verl.
        overrides: For YAML, as for Hydra: KEY=VALUE, +KEY=VALUE, ~KEY.
        to: The new recipe; by default, the name of the file with .toml, in this folder.
    """
    from areal_flow.config import build_recipe
    from pipelines.importing.files import read_options
    from pipelines.importing.recipe import convert

    to = to or Path(f"{file.stem}.toml")
    if to.exists():
        raise ConfigError(f"{to} exists: name another file by --to")
    result = convert(read_options(file, overrides), file.parent)
    invalid = ""
    try:
        build_recipe(nest(result.table()), source=str(to))
    except ConfigError as error:
        invalid = str(error).replace("; nothing was started", "")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(result.to_toml(file.name))
    return _report(result, file, to, invalid)


def _report(result: Import, file: Path, to: Path, invalid: str) -> Report:
    from pipelines.importing.recipe import Fate

    tool, settings = TOOLS[result.options.tool], result.table()
    by_fate = {fate: result.with_fate(fate) for fate in Fate}
    differences = [
        {"option": option, "here": setting, "what differs": note}
        for option, notes in result.differences().items()
        for setting, note in notes
    ]
    reasons: dict[str, list[str]] = {}
    for option, why in by_fate[Fate.WITHOUT].items():
        reasons.setdefault(why, []).append(option)
    without = [{"why": why, "option": ", ".join(names)} for why, names in reasons.items()]
    by_hand = [{"option": each, "why": why} for each, why in by_fate[Fate.BY_HAND].items()]
    overruled = [{"option": each, "why": why} for each, why in by_fate[Fate.OVERRULED].items()]
    unknown, needless = ([*by_fate[fate]] for fate in (Fate.UNKNOWN, Fate.NEEDS_NONE))
    tables = [
        Table(rows, title, prose=("option", "why", "what differs"))
        for title, rows in (
            ("To set by hand", by_hand),
            ("Differs in meaning", differences),
            ("Overruled", overruled),
            ("Without a counterpart", without),
        )
        if rows
    ]
    lines = [f"{to}: {len(settings)} settings from {tool}'s {file.name}"]
    if unknown:
        lines.append(f"Not in {VERSIONS[result.options.tool]}: {', '.join(unknown)}")
    if needless:
        lines.append(f"Off or the same here, without a setting: {', '.join(needless)}")
    if invalid:
        lines.append(f"Not valid yet: {invalid}")
    data = {
        "recipe": str(to),
        "tool": tool,
        "settings": settings,
        "by_hand": by_hand,
        "differs": differences,
        "overruled": overruled,
        "without": without,
        "unknown": unknown,
        "same": needless,
        "invalid": invalid,
    }
    return Report(data, [lines[0], *tables, *lines[1:]], code=1 if invalid else 0)


def names_page() -> str:
    lines = [
        "# Names in TRL, verl and AReaL",
        "",
        "What their options are called here, and where the meaning differs. Defaults are theirs,",
        "where they count. Unknown options are answered from these tables, on the command line and",
        "in Python. `areal-flow import FILE` writes a recipe from YAML of verl or AReaL, with",
        "overrides as `KEY=VALUE`, a script of TRL or a shell script that starts verl. Each line",
        "has its origin, and what differs, has no counterpart or is to be set by hand is listed;",
        "nothing is executed. Made from `areal_flow/config/other_tools.toml` by",
        "`python -m pipelines.cli.importing > docs/guides/names.md`.",
    ]
    for tool in TOOLS:
        records = [each for several in counterparts(tool).values() for each in several]
        lines += ["", f"## {VERSIONS[tool]}", ""]
        lines += ["| option | here | default | what differs |", "|---|---|---|---|"]
        lines += [_row(each) for each in records if each.setting]
        lines += ["", "Without a counterpart:", "", "| option | why |", "|---|---|"]
        options: dict[str, list[str]] = {}
        for each in records:
            if each.reason:
                fixed = "" if each.value is None else f" (other than {_shown(each.value)})"
                options.setdefault(each.reason, []).append(f"`{each.option}`{fixed}")
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in options.items()]
    return "\n".join([*lines, ""])


def _row(record: Counterpart) -> str:
    changed = ((theirs, ours) for theirs, ours in record.values.items() if theirs != ours)
    values = (f"{theirs} is {ours or 'left out'}" for theirs, ours in changed)
    differs = "; ".join(filter(None, [record.note, ", ".join(values)]))
    default = "" if record.default is None else _shown(record.default)
    return f"| `{record.option}` | `{record.setting}` | {default} | {differs} |"


def _shown(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


COMMANDS = (import_,)

if __name__ == "__main__":
    print(names_page(), end="")
