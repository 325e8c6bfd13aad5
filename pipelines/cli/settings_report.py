"""`areal-flow settings`: every setting of a recipe with its type, default and meaning."""

from __future__ import annotations

from dataclasses import asdict
from difflib import get_close_matches

from areal_flow.errors import ConfigError
from pipelines.cli.settings import Setting, all_settings
from pipelines.console.tables import Report, Table


def report_settings(wanted: str | None) -> Report:
    """Report all settings, those of a section and of the sections within it, or one setting.

    Args:
        wanted: a section or a setting by its dotted name, as in a recipe or on the command line.
    """
    name = (wanted or "").strip("-[]").replace("-", "_")
    sections = [
        (section, meaning, chosen)
        for section, meaning, settings in all_settings()
        if (chosen := [s for s in settings if f"{s.name}.".startswith(f"{name}." * bool(name))])
    ]
    if not sections:
        raise ConfigError(f"settings {wanted}: {_nearest(name)}")
    found = [
        {"section": section, "meaning": meaning, "settings": [asdict(each) for each in settings]}
        for section, meaning, settings in sections
    ]
    tables = [_table(*section) for section in sections]
    return Report({"sections": found}, tables)


def _nearest(name: str) -> str:
    sections = [(section.strip("[]"), settings) for section, _, settings in all_settings()]
    names = [section for section, _ in sections if section]
    known = [*names, *(setting.name for _, settings in sections for setting in settings)]
    if close := get_close_matches(name, known, n=3):
        return f"there is no such section or setting; did you mean {' or '.join(close)}?"
    return f"expected a setting, or a section: {', '.join(names)}"


def _table(section: str, meaning: str, settings: list[Setting]) -> Table:
    rows = [
        {
            "setting": setting.name.rpartition(".")[2],
            "type": _kind(setting),
            "default": setting.default,
            "meaning": setting.meaning,
        }
        for setting in settings
    ]
    heading = section if section.startswith("[") or not section else f"[{section}]"
    return Table(rows, f"{heading} {meaning}".strip(), prose=("type", "default", "meaning"))


def _kind(setting: Setting) -> str:
    kind = " or ".join(setting.choices) or setting.kind
    return f"{kind}, {setting.rule}" if setting.rule else kind
