"""Messages about wrong settings: the setting as it was given, the rule, and which name was meant.

A recipe is a file with options or keywords over it. A message names the one that has the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from difflib import SequenceMatcher
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

OPTION = "--{}"
"""How a setting is spelled on the command line."""
ALIKE = 0.6
"""Names that are less alike than this, of 1, are not suggested."""
TRL_NAMES = {
    "beta": "algorithm.kl_coefficient",
    "delta": "algorithm.dual_clip",
    "entropy_coef": "algorithm.entropy_coefficient",
    "eval_steps": "evaluation.every_steps",
    "loss_type": "algorithm.name",
    "max_completion_length": "generation.max_new_tokens",
    "max_steps": "num_steps",
    "num_generations": "controller.group_size",
    "save_steps": "trainer.checkpoint_every_steps",
    "vllm_max_model_length": "generation.max_model_len",
    "warmup_steps": "trainer.num_learning_rate_warmup_steps",
}
"""What some of TRL 1.16's settings are called here."""


def explain(
    error: ValidationError,
    model: type[BaseModel],
    *,
    source: str,
    given: Collection[str] = (),
    spelling: str = "{}",
) -> str:
    """Return a message of a line for each setting that is wrong, and why.

    Args:
        model: what the settings were to be.
        source: the file that holds a mistake, if one does.
        given: names of settings that the user gave beside it.
        spelling: how those were given: `OPTION`, or such as `--set {}`.
    """
    details, names = [*_causes(error)], [*setting_names(model)]
    where = f"{source}: " if source else ""
    lines = [f"{where}{len(details)} setting(s) are wrong; nothing was started"]
    for detail in details:
        field = _field(model, detail["loc"])
        called = spell(field, spelling) if field in given else field
        rule = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden" and field in names:
            lines.append(f"  {called}: {detail['loc'][-2]!r} has no such setting, others have")
        elif detail["type"] == "extra_forbidden":
            lines.append(f"  {called}: there is no such setting{did_you_mean(field, names)}")
        elif detail["type"] == "value_error":
            lines.append(f"  {_spelled(rule, given, spelling)}")
        else:
            lines.append(f"  {called} = {detail['input']!r}: {rule}")
    return "\n".join(lines)


def _causes(error: ValidationError) -> Iterator[ErrorDetails]:
    """Yield what is wrong, without what is so only because a part of it is."""
    details = error.errors()
    for detail in details:
        location = detail["loc"]
        if not any(d["loc"][: len(location)] == location != d["loc"] for d in details):
            yield detail


def spell(name: str, spelling: str) -> str:
    """Return what a user gave for a setting: an option has hyphens for underscores."""
    return spelling.format(name.replace("_", "-") if spelling == OPTION else name)


def _spelled(rule: str, given: Collection[str], spelling: str) -> str:
    for name in filter(lambda name: "." in name, given):
        whole_name = rf"(?<![\w.]){re.escape(name)}(?![\w.])"
        rule = re.sub(whole_name, lambda _, name=name: spell(name, spelling), rule)  # type: ignore[misc]
    return rule


def setting_names(
    model: type[BaseModel], prefix: str = "", *, in_arrays: bool = True
) -> Iterator[str]:
    """Yield the dotted names of all settings; `in_arrays`: also of sections that may be several."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if in_arrays or get_origin(field.annotation) is not tuple:
            for section in _models(field.annotation):
                yield from setting_names(section, f"{prefix}{name}.", in_arrays=in_arrays)


def _models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the models that a field holds one or several of; one with a plain value has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        return tuple(model for part in get_args(annotation) for model in _models(part))
    return ()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the known settings or options nearest to one that is not."""
    return f". Did you mean {' or '.join(found)}?" if (found := nearest(name, known)) else ""


def nearest(name: str, known: Iterable[str], *, most: int = 2) -> list[str]:
    """Return the known names most like another one, the best first; none if none is alike.

    A dotted name is compared as a whole and by its last part, of which a word or the initials
    count as alike, too: `steps` is near `num_steps`, `lr` near `trainer.learning_rate`. A name of
    TRL's is near what it is called here.
    """
    if (ours := TRL_NAMES.get(name.lstrip("-").replace("-", "_"))) in (known := [*known]):
        return [ours]
    likeness = {other: _likeness(name, other) for other in dict.fromkeys(known)}
    best = max(likeness.values(), default=0.0)
    alike = [other for other in likeness if likeness[other] >= max(ALIKE, best - 0.05)]
    return sorted(alike, key=lambda other: (-likeness[other], other.count(".")))[:most]


def _likeness(name: str, other: str) -> float:
    section, _, last = name.lstrip("-").replace("-", "_").rpartition(".")
    other_section, _, other_last = other.lstrip("-").replace("-", "_").rpartition(".")
    words = other_last.split("_")
    if last == "".join(word[:1] for word in words):
        part = 1.0
    else:
        part = max(_ratio(last, other_last), *(0.75 * _ratio(last, word) for word in words))
    whole = _ratio(f"{section}.{last}", f"{other_section}.{other_last}")
    return max(whole, part - 0.1 * (section not in ("", other_section)))


def _ratio(text: str, other: str) -> float:
    return SequenceMatcher(None, text, other).ratio()


def _field(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return the dotted name of a location; the tag of a union is no part of it."""
    names: list[str] = []
    models: tuple[type[BaseModel], ...] = (model,)
    tag_comes = False
    for part in location:
        fields = [of.model_fields[str(part)] for of in models if str(part) in of.model_fields]
        is_tag = not fields and tag_comes
        if fields:
            models = tuple(found for field in fields for found in _models(field.annotation))
        tag_comes = bool(fields) and len(models) > 1
        if not is_tag:
            names.append(str(part))
    return ".".join(names)
