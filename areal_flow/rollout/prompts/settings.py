"""A recipe's prompts: their settings, and the plan that resolves them.

`Recipe.prompt_plan` makes the plan; preparing and rendering prompts needs nothing else of a recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from areal_flow.core.settings import Settings, require
from areal_flow.rollout.workflows.registry import WorkflowSettings


class DifficultySettings(Settings):
    """Select training prompts by their pass rate in an earlier run."""

    run: str = ""
    """Name or directory of the earlier run; empty: train on all prompts."""
    pass_rate_range: tuple[float, float] = Field((0.05, 0.95), strict=False)
    """Minimum and maximum pass rate of the prompts to train on."""
    min_samples: int = Field(4, ge=1)
    """Prompts with fewer completions in that run count as unseen."""
    keep_unseen: bool = True
    """Also train on unseen prompts."""

    @model_validator(mode="after")
    def _consistent(self) -> DifficultySettings:
        require(
            0 <= self.pass_rate_range[0] <= self.pass_rate_range[1] <= 1,
            f"prompts.difficulty.pass_rate_range ({[*self.pass_rate_range]}) must be two numbers "
            "from 0 to 1, the larger last",
        )
        return self


class RowsSettings(Settings):
    """Where some rows are and which of their fields ask and answer; None: as `[prompts]` says."""

    path: Path | None = Field(None, strict=False)
    question_field: str | None = None
    answer_field: str | None = None
    template: str | None = None

    def over_prompts(self) -> dict[str, Any]:
        """Return what these rows have instead of the settings of `[prompts]`."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        shared = PromptSettings.model_fields.keys() & own.keys()
        return {name: own[name] for name in shared if own[name] not in (None, "")}


class SourceSettings(RowsSettings):
    """One of several sources of prompts; what it leaves out is as `[prompts]` says."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Name of the source in trajectories, metrics and rewards."""
    weight: float = Field(1.0, gt=0)
    """Sampling weight relative to the other sources; at least 0.001% of the total."""
    source: str = "file"
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a reasoning-gym task; of a Hugging Face dataset `config`, `split`,
    `held_out_split`, `revision`."""
    held_out_path: Path | None = Field(None, strict=False)
    num_prompts: int | None = Field(None, ge=1)
    num_held_out: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> SourceSettings:
        where = f"sources {self.name!r}"
        require(self.source != "file" or self.path is not None, f"{where}: path is needed")
        template = self.template is None or "{question}" in self.template
        require(template, f"{where}: template must contain {{question}}")
        return self


class HeldOutSettings(RowsSettings):
    """One more held-out set, evaluated with the others and reported by its name."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,80}$")
    """Name of the set in reports and metrics; `rewards.sources` may refer to it."""
    path: Path = Field(strict=False)
    num_prompts: int = Field(0, ge=0)
    """Use only the first rows of the file; 0: all."""
    num_samples: int | None = Field(None, ge=1)
    """Answers per prompt; none: `evaluation.num_samples`."""

    @model_validator(mode="after")
    def _consistent(self) -> HeldOutSettings:
        require(
            not self.template or "{question}" in self.template,
            f"the template of the held-out set {self.name!r} must contain {{question}}",
        )
        return self


class PromptSettings(Settings):
    """Where prompts come from and how they are rendered."""

    source: str = "arithmetic"
    """`file`; generated prompts: `arithmetic`, `calculator`, `one_liners`, `sentences`,
    `reasoning_gym:TASK`;
    `datasets:NAME` (Hugging Face); `verifiers:ENVIRONMENT`; or `harbor:FOLDER` (tasks with
    tests)."""
    path: Path | None = Field(None, strict=False)
    """One prompt per row: a JSONL, Parquet, CSV or Arrow file, a folder of `datasets.save_to_disk`,
    a Lance dataset, or a dataset of the hub, `owner/name:config@split` (split `train` by default).
    Implies `source = "file"`."""
    held_out_path: Path | None = Field(None, strict=False)
    """Held-out prompts, as `path` (split `test` by default); default: a random part of `path`."""
    question_field: str | None = None
    """The field with the question: text, or messages with `role` and `content`, the last one from
    the user. `a.b` is the field `b` in `a`; none: the first of `question`, `problem`, `prompt`,
    `messages`, `query`, `input` and `instruction` that the rows have."""
    answer_field: str | None = None
    """The field with the reference answer: text, a number or a list; only needed by rewards that
    compare with it. None: the first of `answer`, `solution`, `ground_truth`,
    `reward_model.ground_truth`, `final_answer`, `target`, `label` and `output`."""
    template: str = "{question}"
    """The prompt, or with a chat template the last user message; `{question}` stands for the
    question."""
    chat_template: bool | None = None
    """Format prompts with the model's chat template; none: only if the first row has messages."""
    system_prompt: str = ""
    """System message for chats that have none; empty: no system message."""
    num_prompts: int = Field(24_000, ge=1)
    """Number of prompts that a source generates; files are always read completely."""
    num_held_out: int = Field(1024, ge=0)
    """Number of held-out prompts, at most a fifth of a file; 0: no evaluation except of
    `evaluation.held_out`."""
    num_terms: tuple[int, int] = Field((3, 7), strict=False)
    """Minimum and maximum number of terms of a sum, for the source `arithmetic`."""
    skip_bad_rows: bool = False
    """Skip bad rows and list them, instead of refusing the file."""
    difficulty: DifficultySettings = DifficultySettings()
    """Select prompts by their pass rate in an earlier run."""

    @model_validator(mode="before")
    @classmethod
    def _path_implies_file(cls, values: Any) -> Any:
        has_only_path = isinstance(values, dict) and values.get("path") and "source" not in values
        return {**values, "source": "file"} if has_only_path else values

    @model_validator(mode="after")
    def _consistent(self) -> PromptSettings:
        require(
            self.source != "file" or self.path is not None,
            "prompts.path is needed when prompts.source is 'file'; give --data FILE, in Python "
            "prompts=...",
        )
        require("{question}" in self.template, "prompts.template must contain {question}")
        require(
            self.chat_template is not False or not self.system_prompt,
            f"prompts.system_prompt ({self.system_prompt[:40]!r}) needs "
            "prompts.chat_template = true",
        )
        require(
            2 <= self.num_terms[0] <= self.num_terms[1],
            f"prompts.num_terms ({[*self.num_terms]}) must be two numbers from 2, the larger last",
        )
        return self


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How the rows of one source or held-out set are read and judged."""

    prompts: PromptSettings
    verifiers: frozenset[str]
    """Verifiers that judge them; with none, rows need no answers."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Where a recipe's rows come from, how they are read, and which verifiers judge them."""

    rows: RowSettings
    """Of `[prompts]` itself, with all verifiers."""
    sources: Mapping[str, RowSettings]
    """By name; the name of a single source is empty."""
    shares: Mapping[str, float]
    """The weight of each source."""
    held_out: Sequence[tuple[HeldOutSettings, RowSettings]]
    """The sets of `[[evaluation.held_out]]`."""
    workflow: WorkflowSettings
    model: str
    """The model's name, for messages."""
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
        """Return how rows of a prompt's source or held-out set are read."""
        sets = {each.name: rows for each, rows in self.held_out}
        return {**self.sources, **sets}.get(source, self.rows)

    def only(self, names: Collection[str]) -> list[tuple[HeldOutSettings, RowSettings]]:
        """Return the held-out sets with these names."""
        return [(each, rows) for each, rows in self.held_out if each.name in names]
