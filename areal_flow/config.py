"""A recipe: TOML in, validated settings out. Everything wrong is said before anything starts.

Unknown keys, wrong types and impossible combinations fail, naming field, value and rule. Anything
here can be overridden by its dotted name: `--trainer.learning-rate 1e-5`.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, ValidationError, model_validator

from areal_flow.errors import ConfigError
from areal_flow.settings import Settings, require
from areal_flow.workflows.registry import WORKFLOWS, WorkflowSettings
from areal_flow.workflows.single_turn import SingleTurn

TINY_MODEL = "tiny"
"""Make a small Qwen2 policy here and warm-start it; anything else is a directory or a hub name."""


class PromptSettings(Settings):
    """Where prompts come from and how they are put to the policy."""

    source: Literal["arithmetic", "file"] = "arithmetic"
    path: Path | None = Field(None, strict=False)
    held_out_path: Path | None = Field(None, strict=False)
    question_field: str = "question"
    answer_field: str = "answer"
    template: str = "{question}"
    num_prompts: int = Field(24_000, ge=1)
    num_held_out: int = Field(1024, ge=0)
    min_terms: int = Field(3, ge=2)
    max_terms: int = Field(7, ge=2)
    skip_bad_rows: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> PromptSettings:
        require(
            self.source != "file" or self.path is not None,
            "prompts.path is needed when prompts.source is 'file'; give --prompts FILE",
        )
        require("{question}" in self.template, "prompts.template must contain {question}")
        require(
            self.min_terms <= self.max_terms,
            f"prompts.min_terms ({self.min_terms}) must not exceed max_terms ({self.max_terms})",
        )
        return self


class WarmStartSettings(Settings):
    """Supervised warm start of the tiny policy: worked answers, blurted ones mixed in late."""

    num_steps: int = Field(2300, ge=0)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(5e-3, gt=0)
    worked_fraction: float = Field(0.24, ge=0, le=1)
    mixed_phase: float = Field(0.12, ge=0, le=1)


class GenerationSettings(Settings):
    """The engine of each generator, and how completions are drawn."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: int = Field(64, ge=1)
    max_model_len: int = Field(128, ge=2)
    max_num_seqs: int = Field(128, ge=1)
    kv_cache_tokens: int = Field(65_536, ge=1)
    interruption: Literal["interrupt", "keep", "drain"] = "interrupt"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"

    @model_validator(mode="after")
    def _fits(self) -> GenerationSettings:
        needed = self.max_num_seqs * self.max_model_len
        require(
            needed <= self.kv_cache_tokens,
            f"generation.max_num_seqs ({self.max_num_seqs}) x max_model_len "
            f"({self.max_model_len}) = {needed} must fit kv_cache_tokens ({self.kv_cache_tokens})",
        )
        require(
            self.max_new_tokens < self.max_model_len,
            f"generation.max_new_tokens ({self.max_new_tokens}) must leave room for a prompt in "
            f"max_model_len ({self.max_model_len})",
        )
        return self


class ControllerSettings(Settings):
    """How much work is in flight and how old it may get. Sizes in trajectories."""

    batch_size: int = Field(512, ge=1)
    group_size: int = Field(16, ge=1)
    max_staleness: int = Field(2, ge=0)
    max_attempts: int = Field(3, ge=1)
    max_consecutive_failures: int = Field(4, ge=1)

    @model_validator(mode="after")
    def _whole_groups(self) -> ControllerSettings:
        require(
            self.batch_size % self.group_size == 0,
            f"controller.group_size ({self.group_size}) must divide "
            f"controller.batch_size ({self.batch_size})",
        )
        return self


class AlgorithmSettings(Settings):
    """Decoupled PPO (arXiv 2505.24298, eq. 5) and its advantages."""

    advantage: Literal["batch_norm", "grpo", "dr_grpo", "rloo"] = "dr_grpo"
    reward_bias: float = -0.5
    reward_scale: float = Field(10.0, gt=0)
    epsilon: float = Field(0.2, gt=0)
    epsilon_high: float | None = Field(None, gt=0)
    num_minibatches: int = Field(2, ge=1)
    importance_weight_rule: Literal["full", "truncate", "mask"] = "full"
    importance_weight_cap: float = Field(5.0, gt=1)


class TrainerSettings(Settings):
    """The optimizer and its checkpoints. Master weights are float32; `dtype` is of the passes."""

    learning_rate: float = Field(3e-4, gt=0)
    num_learning_rate_warmup_steps: int = Field(0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    tokens_per_micro_batch: int = Field(4096, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    checkpoint_every_steps: int = Field(20, ge=1)
    keep_checkpoints: int = Field(3, ge=1)


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A name of the registry, an import path `package.module:function`, or a shipped function."""
    weight: float = 1.0
    """What this reward is multiplied by in the sum."""


class ClusterSettings(Settings):
    """Local worker processes; with one thread each, results do not depend on their number."""

    num_generators: int = Field(1, ge=1)
    threads_per_worker: int = Field(1, ge=1)
    num_trainers: int = Field(1, ge=1)
    num_trainer_threads: int = Field(1, ge=1)
    num_reward_workers: int = Field(1, ge=1)
    """Worker processes that score completions and call tools."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    silent_after_s: float = Field(10.0, ge=1)
    worker_ttl_s: float = Field(60.0, gt=0)


class TrackingSettings(Settings):
    """MLflow: a database beside the runs unless a server's address is given."""

    enabled: bool = True
    uri: str = ""
    experiment: str = "areal-flow"
    registered_model: str = "areal-flow"


class Recipe(Settings):
    """Everything a run is made of."""

    model: str = TINY_MODEL
    seed: int = Field(0, ge=0)
    num_steps: int = Field(90, ge=0)
    max_minutes: float | None = Field(None, gt=0)
    schedule: Literal["async", "sync"] = "async"
    prompts: PromptSettings = PromptSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    generation: GenerationSettings = GenerationSettings()
    controller: ControllerSettings = ControllerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    workflow: WorkflowSettings = SingleTurn()
    """What an episode is: a workflow's name and its own settings."""
    rewards: tuple[RewardSettings, ...] = Field((RewardSettings(),), min_length=1, strict=False)
    """Each `[[rewards]]` table is one; the reward of a completion is their weighted sum."""
    cluster: ClusterSettings = ClusterSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        require(
            self.model != TINY_MODEL
            or self.prompts.source == "arithmetic"
            or not self.warm_start.num_steps,
            f"warm_start.num_steps ({self.warm_start.num_steps}) must be 0 unless prompts.source "
            "is 'arithmetic': only sums have worked answers to imitate; see the gsm8k recipe",
        )
        names = [reward.verifier for reward in self.rewards]
        require(len(set(names)) == len(names), f"rewards: a verifier is named twice in {names}")
        require(
            self.algorithm.num_minibatches <= self.groups_per_step,
            f"algorithm.num_minibatches ({self.algorithm.num_minibatches}) must not exceed the "
            f"{self.groups_per_step} groups of a batch",
        )
        require(
            self.trainer.tokens_per_micro_batch >= self.generation.max_model_len,
            f"trainer.tokens_per_micro_batch ({self.trainer.tokens_per_micro_batch}) must hold one "
            f"sequence of generation.max_model_len ({self.generation.max_model_len})",
        )
        return self

    @property
    def groups_per_step(self) -> int:
        return self.controller.batch_size // self.controller.group_size

    def digest(self) -> str:
        """Return the identity of these settings, for the ledger.

        How long to train is left out: a resume may change it, and no step depends on it.
        """
        settings = self.model_dump_json(exclude={"num_steps", "max_minutes"})
        return hashlib.sha256(settings.encode()).hexdigest()[:16]


def load_recipe(path: Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table.

    Raises:
        ConfigError: naming every field that is wrong, its value and the rule.
    """
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"expected a recipe at {path}, found no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return build_recipe(_merge(table, overrides or {}), source=str(path))


def build_recipe(table: dict[str, Any], *, source: str) -> Recipe:
    """Validate a nested table; see `load_recipe`."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as TOML, defaults written out."""
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn `--a.b-c VALUE` and `--a.b-c=VALUE` into a nested table; values are TOML or plain text.

    Raises:
        ConfigError: an argument is not an option, or an option has no value.
    """
    table: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        option = remaining.pop(0)
        if not option.startswith("--") or option == "--":
            raise ConfigError(f"expected --SECTION.SETTING VALUE, found {option!r}")
        name, equals, value = option[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"--{name} needs a value")
            value = remaining.pop(0)
        _assign(table, name.replace("-", "_").split("."), _parse_value(value))
    return table


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(table: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        table = table.setdefault(key, {})
    table[path[-1]] = value


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = (
            _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def _explain(error: ValidationError, source: str) -> str:
    lines = [f"{source}: {error.error_count()} setting(s) are wrong; nothing was started"]
    for detail in error.errors():
        field = ".".join(str(part) for part in detail["loc"] if part not in WORKFLOWS)
        rule = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            lines.append(f"  {field}: there is no such setting")
        elif detail["type"] == "value_error":
            lines.append(f"  {rule}")
        else:
            lines.append(f"  {field} = {detail['input']!r}: {rule}")
    return "\n".join(lines)
