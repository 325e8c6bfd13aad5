"""What TRL, verl and AReaL call a setting: the records of `other_tools.toml`, by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = {"trl": "TRL", "verl": "verl", "areal": "AReaL"}


@dataclass(frozen=True, slots=True)
class Counterpart:
    """An option of another tool, and what it is here."""

    tool: str
    """A key of `TOOLS`."""
    option: str
    """Its name there; without a counterpart also a pattern, in which * stands for any text."""
    setting: str = ""
    """Our setting; empty: there is no counterpart, for a reason."""
    default: Any = None
    """Theirs, where it counts."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Our value of each of theirs, if they differ."""
    convert: str = ""
    """The conversion of a value in another unit."""
    note: str = ""
    """How the meaning differs."""
    value: Any = None
    """Without a counterpart: the value that needs none, since it is always so here."""
    reason: str = ""
    """Why there is no counterpart."""


@cache
def counterparts(tool: str) -> dict[str, list[Counterpart]]:
    """Return the records of a tool by option or pattern, in the order of the file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[tool]
    records: dict[str, list[Counterpart]] = {}
    for option, given in table["settings"].items():
        several = given if isinstance(given, list) else [given]
        tables = [{"setting": each} if isinstance(each, str) else each for each in several]
        records[option] = [Counterpart(tool, option, **each) for each in tables]
    for option, fixed in table["fixed"].items():
        records[option] = [Counterpart(tool, option, **fixed)]
    for group in table["without"]:
        for option in group["names"]:
            records[option] = [Counterpart(tool, option, reason=group["reason"])]
    return records


def counterparts_of(tool: str, option: str) -> list[Counterpart]:
    """Return the records of an option, or that of the first pattern that it matches."""
    records = counterparts(tool)
    if option in records:
        return records[option]
    return next((each for name, each in records.items() if fnmatchcase(option, name)), [])


def renamed(name: str) -> Counterpart | None:
    """Return the record of another tool's option that is a setting of another name here.

    A name may lack its first parts (`rollout.n`), if all options that end so are one setting, or
    have parts before it (`trainer.num_generations`).
    """
    parts = name.split(".")
    for place in range(len(parts)):
        matches = _by_ending().get(".".join(parts[place:]), [])
        if len({each.setting for each in matches}) == 1 and matches[0].setting:
            last = matches[0].setting.rpartition(".")[2]
            return None if place and last == parts[-1] else matches[0]
    return None


def missing(name: str) -> Counterpart | None:
    """Return the record of another tool's option that has no counterpart here."""
    for tool in TOOLS:
        for record in counterparts_of(tool, name)[:1]:
            return None if record.setting else record
    return None


@cache
def _by_ending() -> dict[str, list[Counterpart]]:
    """Return options by each ending of their names; one that is a full name stands alone."""
    options = [records[0] for tool in TOOLS for records in counterparts(tool).values()]
    endings: dict[str, list[Counterpart]] = {}
    for each in options:
        parts = each.option.split(".")
        for place in range(1, len(parts)):
            endings.setdefault(".".join(parts[place:]), []).append(each)
    return endings | {each.option: [each] for each in reversed(options)}
