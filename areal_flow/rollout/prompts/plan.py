"""A recipe's prompts, resolved: where rows come from, how they are read, who judges them.

`Recipe.prompt_plan` makes it; preparing and rendering prompts needs nothing else of a recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_flow.rollout.prompts.settings import HeldOutSettings, PromptSettings
from areal_flow.rollout.workflows.registry import WorkflowSettings


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How the rows of one source or held-out set are read and judged."""

    prompts: PromptSettings
    verifiers: frozenset[str]
    """Who judges them; none: they need no answers."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    rows: RowSettings
    """Of `[prompts]` itself, with all verifiers."""
    sources: Mapping[str, RowSettings]
    """By name; of a run with a single source the name is empty."""
    shares: Mapping[str, float]
    """The weight of each source."""
    held_out: Sequence[tuple[HeldOutSettings, RowSettings]]
    """The sets of `[[evaluation.held_out]]`."""
    workflow: WorkflowSettings
    model: str
    """Its name, for messages."""
    max_model_len: int
    max_new_tokens: int
    seed: int

    def files(self) -> list[tuple[Path, RowSettings]]:
        files = [
            (path, rows)
            for rows in self.sources.values()
            for path in (rows.prompts.path, rows.prompts.held_out_path)
            if path is not None
        ]
        return files + [(each.path, rows) for each, rows in self.held_out]

    def rows_of(self, source: str) -> RowSettings:
        """Return how rows are read, by the source or held-out set that a prompt names."""
        sets = {each.name: rows for each, rows in self.held_out}
        return {**self.sources, **sets}.get(source, self.rows)

    def only(self, names: Collection[str]) -> list[tuple[HeldOutSettings, RowSettings]]:
        """Return the held-out sets of these names."""
        return [(each, rows) for each, rows in self.held_out if each.name in names]
