"""Converts the options of a file into settings, and writes them as a recipe with their origin."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import tomlkit

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config.listing import setting_names
from areal_flow.config.other_tools import TOOLS, Counterpart, counterparts, counterparts_of
from areal_flow.training.settings import TrainerSettings
from pipelines.importing.conversions import CONVERSIONS, ByHand, NoCounterpart
from pipelines.importing.files import Options

NEEDED = {
    "model": "without it, a tiny model is trained",
    "prompts.path": "without it, prompts are generated sums",
    "rewards": "without it, completions are compared with numeric answers",
}
"""Settings without which a recipe would train something else, and what."""


class Fate(Enum):
    """What becomes of an option, the first that holds."""

    USED = "used"
    BY_HAND = "by hand"
    OVERRULED = "overruled by another option"
    WITHOUT = "no counterpart"
    UNKNOWN = "not an option of the tool"
    NEEDS_NONE = "needs no setting, since it is so here"


@dataclass(slots=True)
class Line:
    """A setting of the recipe."""

    value: Any
    options: list[str]
    """Where it is from."""
    is_default: bool = False
    """Whether it is the tool's default, since the file does not give it."""


@dataclass(slots=True)
class Import:
    """The settings of a file, and what became of each of its options."""

    options: Options
    folder: Path
    lines: dict[str, Line] = field(default_factory=dict)
    fates: dict[str, list[tuple[Fate, str]]] = field(default_factory=dict)
    """By option, with an explanation; several if an option is several settings."""

    def fate(self, option: str) -> tuple[Fate, str]:
        order = list(Fate)
        return min(self.fates[option], key=lambda each: order.index(each[0]))

    def with_fate(self, fate: Fate) -> dict[str, str]:
        """Return the options of a fate, and the explanation of each."""
        fates = {option: self.fate(option) for option in self.fates}
        return {option: why for option, (each, why) in fates.items() if each is fate}

    def differences(self) -> dict[str, list[tuple[str, str]]]:
        """Return settings and notes of the options that have another meaning here."""
        return {
            option: notes
            for option in self.with_fate(Fate.USED)
            if (notes := [(r.setting, r.note) for r in self._records(option) if r.note])
        }

    def table(self) -> dict[str, Any]:
        """Return the settings by dotted name."""
        return {name: line.value for name, line in self.lines.items()}

    def to_toml(self, source: str) -> str:
        """Return the recipe, in the order of `areal-flow settings`."""
        tool = TOOLS[self.options.tool]
        head = [f"# From {tool}'s {source}; other settings have the defaults of areal-flow."]
        by_hand = self.with_fate(Fate.BY_HAND)
        head += ["#", "# To set by hand:"] if by_hand else []
        head += [f"#   {option}: {why}".replace("\n", " ") for option, why in by_hand.items()]
        sections: dict[str, list[str]] = {"": []}
        tables: list[str] = []
        for name, line in self.lines.items():
            section, _, key = name.rpartition(".")
            if name == "rewards":
                tables += ["", f"# {', '.join(line.options)}"]
                for reward in line.value:
                    pairs = (f"{k} = {tomlkit.item(v).as_string()}" for k, v in reward.items())
                    tables += ["[[rewards]]", *pairs, ""]
            else:
                entry = f"{key} = {tomlkit.item(line.value).as_string()}"
                sections.setdefault(section, []).append(f"{entry}  # {self._origin(name, line)}")
        text = [*head, "", *sections.pop("")]
        for section, entries in sections.items():
            named_first = sorted(entries, key=lambda each: not each.startswith("name = "))
            text += ["", f"[{section}]", *named_first]
        return "\n".join([*text, *tables]).rstrip("\n") + "\n"

    def _origin(self, setting: str, line: Line) -> str:
        if line.is_default:
            (option,) = line.options
            records = self._records(option)
            record = next((each for each in records if each.setting == setting), records[0])
            value = "" if record.default == line.value else f" = {record.default}"
            return f"{TOOLS[self.options.tool]}'s default of {option}{value}"
        if all(self.options.given[option] == line.value for option in line.options):
            return ", ".join(line.options)
        values = (f"{option} = {self.options.given[option]}" for option in line.options)
        return ", ".join(" ".join(f"{each:.80}".split()) for each in values)

    def _records(self, option: str) -> list[Counterpart]:
        return counterparts_of(self.options.tool, option)


class _Converter:
    """Settles each setting by the options that are one; conversions ask it for options."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.folder = folder
        self._options = options
        self._result = Import(options, folder)
        self._lines: dict[str, Line | None] = {}

    def get(self, option: str) -> Any:
        if option in self._options.by_hand:
            raise ByHand(f"it depends on {option}")
        if option in self._options.given:
            return self._options.given[option]
        record = next(iter(counterparts_of(self._options.tool, option)), None)
        return None if record is None else record.default

    def is_given(self, option: str) -> bool:
        return self._options.given.get(option) is not None

    def has(self, option: str) -> bool:
        return option in self._options.given

    def ours(self, setting: str) -> Any:
        line = self._line(setting)
        return None if line is None else line.value

    def convert(self) -> Import:
        for setting in self._settings:
            if (line := self._line(setting)) is not None:
                self._result.lines[setting] = line
        for option, value in self._options.given.items():
            self._explain_others(option, value)
        for option, why in self._options.by_hand.items():
            records = counterparts_of(self._options.tool, option)
            reason = records[0].reason if records else ""
            self._note(option, Fate.WITHOUT if reason else Fate.BY_HAND, reason or why)
        self._make_room_in_micro_batches()
        self._drop_settings_of_other_algorithms()
        self._ask_for_needed()
        return self._result

    @cached_property
    def _settings(self) -> dict[str, list[Counterpart]]:
        """The records of each setting, in the order of `areal-flow settings`."""
        by_setting: dict[str, list[Counterpart]] = {}
        for records in counterparts(self._options.tool).values():
            for each in records:
                by_setting.setdefault(each.setting, []).append(each)
        return {name: by_setting[name] for name in setting_names() if name in by_setting}

    def _line(self, setting: str) -> Line | None:
        if setting not in self._lines:
            self._lines[setting] = self._settled(setting)
        return self._lines[setting]

    def _settled(self, setting: str) -> Line | None:
        given, records = self._options.given, self._settings.get(setting, ())
        line: Line | None = None
        unread: list[tuple[str, str]] = []
        for record in records:
            if record.option not in given:
                continue
            fate, result = self._outcome(record, given[record.option])
            if fate is Fate.BY_HAND and line is None:
                unread.append((record.option, result))
            elif fate not in (Fate.USED, Fate.BY_HAND):
                self._note(record.option, fate, result or "")
            elif line is None:
                line = Line(result, [record.option])
            elif result == line.value:
                line.options.append(record.option)
            else:
                used = f"{line.options[0]} counts for {setting}"
                self._note(record.option, Fate.OVERRULED, used)
        for option in () if line is None else line.options:
            self._note(option, Fate.USED, "")
        for option, why in unread:
            fate = Fate.BY_HAND if line is None else Fate.OVERRULED
            self._note(option, fate, why if line is None else f"{line.options[0]} counts")
        has_own = any(each.option in self._options.by_hand for each in records)
        return line or (None if unread or has_own else self._default(setting))

    def _default(self, setting: str) -> Line | None:
        given = self._options.given
        for record in self._settings.get(setting, ()):
            if record.default is None or record.option in given:
                continue
            fate, result = self._outcome(record, record.default)
            if fate is Fate.USED:
                return Line(result, [record.option], is_default=True)
            if fate is Fate.BY_HAND:
                self._note(setting, fate, result)
        return None

    def _outcome(self, record: Counterpart, value: Any) -> tuple[Fate, Any]:
        """Return our value, or why there is none."""
        if value is None:
            return Fate.NEEDS_NONE, ""
        if record.values:
            if str(value) not in record.values:
                return Fate.WITHOUT, f"there is no {value!r} here"
            ours = record.values[str(value)]
            return (Fate.NEEDS_NONE, "") if ours == "" else (Fate.USED, ours)
        if not record.convert:
            return Fate.USED, value
        try:
            ours = CONVERSIONS[record.convert](value, self)
        except ByHand as reason:
            return Fate.BY_HAND, str(reason)
        except NoCounterpart as reason:
            return Fate.WITHOUT, str(reason)
        except (TypeError, ValueError, AttributeError):
            return Fate.BY_HAND, f"{value!r:.60} is not a value that can be converted"
        return (Fate.NEEDS_NONE, "") if ours is None else (Fate.USED, ours)

    def _explain_others(self, option: str, value: Any) -> None:
        """Note what becomes of an option that is no setting."""
        records = counterparts_of(self._options.tool, option)
        if records and records[0].setting:
            return
        if not records:  # a whole section may be off
            self._note(option, Fate.NEEDS_NONE if value in (None, {}) else Fate.UNKNOWN, "")
        elif value is None or records[0].value in (value, str(value).lower()):
            self._note(option, Fate.NEEDS_NONE, "")
        else:
            self._note(option, Fate.WITHOUT, records[0].reason)

    def _make_room_in_micro_batches(self) -> None:
        """Let a micro-batch hold a sequence, where no option says what it holds."""
        lines, setting = self._result.lines, "trainer.tokens_per_micro_batch"
        context = lines.get("generation.max_model_len")
        if context is None or setting in lines or not isinstance(context.value, int):
            return
        if context.value > TrainerSettings().tokens_per_micro_batch:
            lines[setting] = context
            order = {name: place for place, name in enumerate(setting_names())}
            self._result.lines = dict(sorted(lines.items(), key=lambda line: order[line[0]]))

    def _drop_settings_of_other_algorithms(self) -> None:
        lines = self._result.lines
        name = lines["algorithm.name"].value if "algorithm.name" in lines else "decoupled_ppo"
        fields = ALGORITHMS[name].model_fields
        proximal = lines["algorithm.proximal"].value if "algorithm.proximal" in lines else None
        behavior = (proximal or fields["proximal"].default) == "behavior"
        for setting in [each for each in lines if each.startswith("algorithm.")]:
            part = setting.split(".")[1]
            if part not in fields or (behavior and part.startswith("importance_weight")):
                self._drop(setting, f"{name} has no {part}")
        for setting in [each for each in lines if each.startswith("generation.vllm.")]:
            if "generation.engine" in lines and lines["generation.engine"].value == "torch":
                self._drop(setting, "it is of vLLM")

    def _drop(self, setting: str, why: str) -> None:
        line = self._result.lines.pop(setting)
        for option in () if line.is_default else line.options:
            self._result.fates[option].remove((Fate.USED, ""))
            self._note(option, Fate.WITHOUT, why)

    def _ask_for_needed(self) -> None:
        result = self._result
        for setting, why in NEEDED.items():
            sources = {"prompts.path": "prompts.source"}
            names = [setting, sources.get(setting, setting)]
            options = [each.option for name in names for each in self._settings.get(name, ())]
            by_hand = result.with_fate(Fate.BY_HAND)
            if not any(name in result.lines or name in by_hand for name in [*names, *options]):
                self._note(setting, Fate.BY_HAND, why)

    def _note(self, option: str, fate: Fate, why: str) -> None:
        fates = self._result.fates.setdefault(option, [])
        if (fate, why) not in fates:
            fates.append((fate, why))


def convert(options: Options, folder: Path) -> Import:
    """Convert what a file of a folder says into settings."""
    return _Converter(options, folder).convert()
