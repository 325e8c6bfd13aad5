"""Held-out sets by name: prompts that no training sees, beside those of the training source.

The name of a set is the source of its prompts, so that `rewards.sources` says what judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from areal_flow.settings import Settings, require

HELD_OUT = "held_out"
"""The name of the set that the training source itself gives."""


class HeldOutSettings(Settings):
    """One more held-out set, evaluated with the others and reported by its name."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,80}$")
    """What reports and sinks call it; `rewards.sources` may name it."""
    path: Path = Field(strict=False)
    """JSONL or Parquet, one prompt a row."""
    num_prompts: int = Field(0, ge=0)
    """At most so many, from the beginning of the file; 0: all."""
    num_samples: int | None = Field(None, ge=1)
    """Answers a prompt of this set; none: as `evaluation.num_samples`."""
    question_field: str = ""
    """As in `prompts`; empty: that of `prompts`."""
    answer_field: str = ""
    """As in `prompts`; empty: that of `prompts`."""
    template: str = ""
    """As in `prompts`; empty: that of `prompts`."""

    @model_validator(mode="after")
    def _consistent(self) -> HeldOutSettings:
        require(
            not self.template or "{question}" in self.template,
            f"the template of the held-out set {self.name!r} must contain {{question}}",
        )
        return self

    def over_prompts(self) -> dict[str, str]:
        names = ("question_field", "answer_field", "template")
        return {name: value for name in names if (value := getattr(self, name))}


def check_names(sets: Sequence[HeldOutSettings]) -> None:
    names = [HELD_OUT, *(each.name for each in sets)]
    require(
        len(set(names)) == len(names),
        f"evaluation.held_out: a name stands twice in {names}, the first of which is the set that "
        "training's own prompts give: rename one",
    )
