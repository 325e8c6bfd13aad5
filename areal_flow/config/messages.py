"""Messages about wrong settings: the setting as it was given, the rule, and a suggested name.

Settings come from a recipe file, from options or from keywords. A message names the wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from pydantic import ValidationError

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config.listing import setting_names
from areal_flow.config.other_tools import TOOLS, missing, renamed
from areal_flow.core.settings import nest

OPTION = "--{}"
"""How a setting is spelled on the command line."""
MIN_SIMILARITY = 0.6
"""Minimum similarity of a suggested name, from 0 to 1."""
MISTYPED = 0.85
"""Similarity from which a name is a mistyped one of ours, whatever other tools have."""
ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Advantage estimators that other tools call algorithms."""


def explain(
    error: ValidationError, *, source: str, given: Collection[str] = (), spelling: str = "{}"
) -> str:
    """Return a message with a line for each wrong setting of a recipe.

    Args:
        source: the file that holds a mistake, if one does.
        given: names of settings that the user gave as overrides.
        spelling: how those were given: `OPTION`, or a format such as `--set {}`.
    """
    errors, names = error.errors(), setting_names()
    parents = {d["loc"][:end] for d in errors for end in range(len(d["loc"]))}
    details = [d for d in errors if d["loc"] not in parents]  # the innermost errors
    where = f"{source}: " if source else ""
    lines = [f"{where}{len(details)} setting(s) are wrong; nothing was started"]
    for detail in details:
        field = _field(detail["loc"])
        called = spell(field, spelling) if field in given else field
        rule = detail["msg"].removeprefix("Value error, ")
        is_unknown = detail["type"] == "extra_forbidden"
        if is_unknown and field in names and "." in str(detail["loc"][-1]):
            nested = nest({field: detail["input"]})
            lines.append(f"  {field!r}: expected a nested table, {nested}, found a dotted name")
        elif is_unknown and field in names:
            lines.append(f"  {called}: {detail['loc'][-2]!r} has no such setting, others have")
        elif is_unknown:
            lines.append(f"  {called}: there is no such setting{did_you_mean(field, names)}")
        elif detail["type"] == "union_tag_invalid" and field == "algorithm":
            name = str(detail["input"]["name"])
            setting = "algorithm.name"
            called = spell(setting, spelling) if setting in given else setting
            lines.append(f"  {called} = {name!r}: {why_no_algorithm(name)}")
        elif detail["type"] == "tuple_type":
            expected = "expected an array, such as [1024, 2048]"
            lines.append(f"  {called} = {detail['input']!r}: {expected}")
        elif detail["type"] == "value_error":
            lines.append(f"  {_spelled(rule, given, spelling)}")
        else:
            lines.append(f"  {called} = {detail['input']!r}: {rule}")
    return "\n".join(lines)


def spell(name: str, spelling: str) -> str:
    """Return a setting's name as a user gives it: options have hyphens for underscores."""
    return spelling.format(name.replace("_", "-") if spelling == OPTION else name)


def why_no_algorithm(name: str) -> str:
    expected = f"expected one of {', '.join(ALGORITHMS)}"
    if name in ADVANTAGES:
        return (
            f"{name.upper()} is a way to compute advantages: set algorithm.advantage to {name!r}, "
            "and algorithm.name to 'ppo' for its clipped loss"
        )
    if name == "dapo":
        return (
            "use algorithm.name = 'ppo' with advantage = 'grpo', epsilon_high = 0.28, "
            "group_filter = 'mixed_rewards' and overlong_tokens"
        )
    return f"{expected}{did_you_mean(name, ALGORITHMS)}"


def _spelled(rule: str, given: Collection[str], spelling: str) -> str:
    for name in filter(lambda name: "." in name, given):
        whole_name = rf"(?<![\w.]){re.escape(name)}(?![\w.])"
        rule = re.sub(whole_name, lambda _, name=name: spell(name, spelling), rule)  # type: ignore[misc]
    return rule


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest settings or options; empty if none is near.

    For an option of TRL, verl or AReaL, it says how the meaning differs, or why there is none.
    """
    candidates = list(candidates)
    matches = nearest(name, candidates)
    theirs = renamed(_plain(name))
    if theirs is not None and [theirs.setting] == [_plain(each) for each in matches]:
        differs = f" {TOOLS[theirs.tool]}'s {theirs.option} differs: {theirs.note}."
        return f". Did you mean {matches[0]}?{differs * bool(theirs.note)}"
    unmatched = missing(_plain(name))
    if unmatched is not None and not nearest(name, candidates, min_similarity=MISTYPED):
        tool = TOOLS[unmatched.tool]
        return f". {tool}'s {_plain(name)} has no counterpart here: {unmatched.reason}."
    return f". Did you mean {' or '.join(matches)}?" if matches else ""


def nearest(
    name: str,
    candidates: Iterable[str],
    *,
    max_names: int = 2,
    min_similarity: float = MIN_SIMILARITY,
) -> list[str]:
    """Return the candidates most similar to a name, best first.

    Dotted names are compared in full and by their last part, also by its words and its initials:
    `steps` is near `num_steps`, `lr` near `trainer.learning_rate`. Another tool's name matches only
    our name of the same setting.
    """
    names = {_plain(each): each for each in candidates}
    theirs = renamed(_plain(name))
    if theirs is not None and theirs.setting in names:
        return [names[theirs.setting]]
    similarity = {each: _similarity(name, each) for each in names.values()}
    best = max(similarity.values(), default=0.0)
    near = [each for each in similarity if similarity[each] >= max(min_similarity, best - 0.05)]
    return sorted(near, key=lambda each: (-similarity[each], each.count(".")))[:max_names]


def _plain(name: str) -> str:
    """Return the setting's name of an option."""
    return name.lstrip("-").replace("-", "_")


def _similarity(name: str, candidate: str) -> float:
    def ratio(left: str, right: str) -> float:
        return SequenceMatcher(None, left, right).ratio()

    section, _, last = _plain(name).rpartition(".")
    candidate_section, _, candidate_last = _plain(candidate).rpartition(".")
    words = candidate_last.split("_")
    if last == "".join(word[:1] for word in words):
        of_last = 1.0
    else:
        of_last = max(ratio(last, candidate_last), *(0.75 * ratio(last, word) for word in words))
    in_full = ratio(f"{section}.{last}", f"{candidate_section}.{candidate_last}")
    return max(in_full, of_last - 0.1 * (section not in ("", candidate_section)))


def _field(location: tuple[int | str, ...]) -> str:
    """Return the dotted name of a location, without the tags of unions in it."""
    kept: list[str] = []
    for place, part in enumerate(location):
        name = ".".join([*(each for each in kept if not each.isdecimal()), str(part)])
        is_tag = isinstance(part, str) and name not in setting_names()
        if not is_tag or place == len(location) - 1:
            kept.append(str(part))
    return ".".join(kept)
