"""The settings of a recipe, each with its type, default and meaning, and how a recipe is read.

A component whose interface needs no vendor keeps its section beside it. Unknown keys, wrong types
and impossible combinations fail, naming field, value and rule. The line under a field is its
meaning, which `areal-flow train --help` and docs/settings.md show.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, ValidationError, model_validator

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.algorithms.learning_rates import RateSchedule
from areal_flow.algorithms.registry import AlgorithmSettings
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.config_errors import explain
from areal_flow.controller.gate import ControllerSettings
from areal_flow.errors import ConfigError
from areal_flow.evaluation.held_out import HeldOutSettings, check_names
from areal_flow.evaluation.pass_rates import PASS_THRESHOLD
from areal_flow.generation.protocol import WHOLE_DISTRIBUTION, GenerationSettings
from areal_flow.prompts.settings import PromptSettings, SourceSettings
from areal_flow.rewards.protocol import RewardSettings
from areal_flow.settings import Settings, flatten, merge, require
from areal_flow.weights.settings import Medium, WeightsSettings
from areal_flow.workflows.agent import Agent
from areal_flow.workflows.registry import WorkflowSettings
from areal_flow.workflows.single_turn import SingleTurn
from areal_flow.workflows.tool_use import ToolUse

SupervisedObjective = Literal["cross_entropy", "dpo", "reward_model"]


class SftSettings(Settings):
    """Supervised fine-tuning on prompts with their completions, before reinforcement learning.

    The rest of its optimizer, the passes' type and the device are those of `trainer`.
    """

    objective: SupervisedObjective = "cross_entropy"
    """What is learned: completions; with `dpo` to prefer one of two, against the first policy;
    with `reward_model` to score them, which makes a reward model of the policy."""
    path: Path | None = Field(None, strict=False)
    """JSONL rows with `prompt` and `completion` or, of preferences, `chosen` and `rejected`: each a
    text, a list of texts of the policy and of the environment by turns, or messages, which the
    model's chat template puts; or rows of `messages`. A model that is made here brings its own."""
    num_held_out: int = Field(0, ge=0)
    """So many rows at the end of the file are not trained, but measured at each checkpoint."""
    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0: no supervised fine-tuning."""
    batch_size: int = Field(64, ge=1)
    """Rows a step."""
    learning_rate: float = Field(1e-5, gt=0)
    """The peak rate."""
    num_learning_rate_warmup_steps: int = Field(30, ge=0)
    """Steps of linear warm-up."""
    learning_rate_schedule: RateSchedule = "cosine"
    """Times the warm-up: constant, or a line or a cosine from the first step to the last, down to
    3% of the peak."""
    shuffle: bool = True
    """Another order every epoch, drawn from the seed; false: the file's own, a curriculum."""
    checkpoint_every_steps: int = Field(500, ge=1)
    """Steps between checkpoints, from which a stopped run goes on."""
    beta: float = Field(0.1, gt=0)
    """How much dpo keeps to the first policy: the implicit reward of a nat of log-ratio."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """How likely the label of a pair is wrong, of dpo and reward_model."""

    @model_validator(mode="after")
    def _consistent(self) -> SftSettings:
        require(
            self.label_smoothing == 0 or self.objective != "cross_entropy",
            f"sft.label_smoothing ({self.label_smoothing}) is of pairs: with sft.objective "
            "'cross_entropy' there are none; set it to 0, or the objective to 'dpo'",
        )
        return self


class AdamWSettings(Settings):
    """The optimizer's own numbers."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """The decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """The decay of the squared gradient."""
    weight_decay: float = Field(0.0, ge=0)
    """How much of each weight a step takes away, times the rate; nothing of norms and biases."""
    max_skipped_steps: int = Field(5, ge=1)
    """The run ends after so many steps in a row with an update that was skipped, since its loss or
    gradient was not finite."""


class LoraSettings(Settings):
    """A low-rank adapter, trained instead of the policy's weights and merged into what is served.

    Supervised fine-tuning before reinforcement learning trains the weights themselves.
    """

    rank: int = Field(0, ge=0)
    """Of the adapter's matrices; 0: no adapter, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's product is added times alpha / rank."""
    target_modules: str = "all-linear"
    """Which matrices have an adapter: the last parts of their names (`q_proj,v_proj`), or
    `all-linear`: all but embedding and head."""

    @property
    def modules(self) -> str | list[str]:
        names = [name.strip() for name in self.target_modules.split(",")]
        return names[0] if names == ["all-linear"] else names


class ParallelSettings(Settings):
    """How trainer ranks share sequences."""

    context_ranks: int = Field(1, ge=1)
    """Trainer ranks that share the tokens of each micro-batch (Ulysses): each has activations of
    its own slice, and some heads of attention. A divisor of `cluster.num_trainers`."""


class TrainerSettings(Settings):
    """The optimizer and its checkpoints. Master weights are float32; `dtype` is of the passes."""

    backend: Literal["replicated", "fsdp"] = "replicated"
    """What holds the policy: replicated is a whole copy of it on each rank, fsdp a part of each
    tensor on each rank, for policies that do not fit on one."""
    learning_rate: float = Field(3e-4, gt=0)
    """The rate of AdamW after the warm-up: the peak of a schedule."""
    num_learning_rate_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    learning_rate_schedule: RateSchedule = "constant"
    """After the warm-up: constant, or a line or a cosine down to 3% of `learning_rate`."""
    num_learning_rate_decay_steps: int = Field(0, ge=0)
    """The step, counted with the warm-up, after which the rate stays at those 3%; 0: the
    `num_steps` that the run is made with."""
    adamw: AdamWSettings = AdamWSettings()
    """The optimizer's own numbers."""
    lora: LoraSettings = LoraSettings()
    """A low-rank adapter instead of all weights."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Packed tokens of one forward and backward pass."""
    parallel: ParallelSettings = ParallelSettings()
    """How trainer ranks share sequences."""
    activations: Literal["keep", "recompute", "offload"] = "keep"
    """What becomes of a layer's activations until its gradient needs them: kept, computed again
    from the layer's input (a third more work, same bits), or moved to main memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the passes; the master weights stay float32."""
    device: str = "cpu"
    """Of the trainer, as torch names it."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(3, ge=1)
    """So many newest checkpoints are kept, and that of step 0."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        require(
            self.backend != "fsdp" or not self.lora.rank,
            f"trainer.lora.rank ({self.lora.rank}) with trainer.backend 'fsdp': an adapter is "
            "small, and what it adapts is not sharded yet; set the backend to 'replicated'",
        )
        return self


class EvaluationSettings(Settings):
    """How held-out prompts are answered, and how often."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations while training goes on; 0: only before and after it."""
    num_samples: int = Field(1, ge=1)
    """Answers a prompt, unless its set has a number of its own; several give pass@k."""
    temperature: float | None = Field(None, ge=0)
    """Of the answers; 0: always the likeliest token; by default that of `generation`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample answers from the likeliest tokens that have this probability together; 1: from all."""
    top_k: int = Field(0, ge=0)
    """Sample answers from so many likeliest tokens; 0: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample answers from tokens with this share of the likeliest one's probability; 0: all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that the prompt or the answer has already; 1: none."""
    min_new_tokens: int = Field(0, ge=0)
    """So many tokens of an answer come before it can stop."""
    stop_after_plateau: int = Field(0, ge=0)
    """Training ends after so many evaluations in a row without a better pass rate; 0: never."""
    held_out: tuple[HeldOutSettings, ...] = Field((), strict=False)
    """Each `[[evaluation.held_out]]` table is one more held-out set, with a name and a file."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        check_names(self.held_out)
        of_sets = {f"evaluation.held_out {s.name!r}: ": s.num_samples for s in self.held_out}
        for where, num_samples in {"evaluation.": self.num_samples, **of_sets}.items():
            require(
                self.temperature != 0 or num_samples in (1, None),
                f"{where}num_samples ({num_samples}) must be 1 at evaluation.temperature 0: "
                "the likeliest answer is always the same",
            )
        require(
            not self.stop_after_plateau or self.every_steps > 0,
            f"evaluation.stop_after_plateau ({self.stop_after_plateau}) needs evaluations while "
            "training goes on: set evaluation.every_steps",
        )
        return self

    def num_samples_of(self, held_out: str) -> int:
        own = next((each.num_samples for each in self.held_out if each.name == held_out), None)
        return own or self.num_samples

    def sampling(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in WHOLE_DISTRIBUTION}
        return own if self.temperature is None else {**own, "temperature": self.temperature}


class TrackingSettings(Settings):
    """MLflow: a database beside the runs unless a server's address is given."""

    enabled: bool = True
    """Whether metrics and models go to MLflow."""
    sink: str = "mlflow"
    """Where numbers, model versions and datasets are shown: a name in `tracking.registry`."""
    uri: str = ""
    """MLflow's address; empty: a database beside the runs."""
    experiment: str = "areal-flow"
    """MLflow's experiment."""
    registered_model: str = "areal-flow"
    """The name under which checkpoints are registered."""


class Recipe(Settings):
    """Everything a run is made of."""

    model: str = "tiny"
    """A model directory, a hub name, or a model made here: `tiny`, `tiny_calculator`,
    `tiny_coder`. If a model directory has such a name, write `./tiny`."""
    seed: int = Field(0, ge=0)
    """Of everything drawn at random."""
    num_steps: int = Field(90, ge=0)
    """Training steps."""
    max_minutes: float | None = Field(None, gt=0)
    """Stop training after this long."""
    schedule: Literal["async", "sync"] = "async"
    """Generation beside training, or in turns."""
    prompts: PromptSettings = PromptSettings()
    """Where prompts come from and how they are put to the policy."""
    sources: tuple[SourceSettings, ...] = Field((), strict=False)
    """Each `[[sources]]` table is one of several sources of prompts, mixed by weight; none: the one
    that `[prompts]` names."""
    sft: SftSettings = SftSettings()
    """Supervised fine-tuning before reinforcement learning."""
    generation: GenerationSettings = GenerationSettings()
    """The engine of each generator, and how completions are drawn."""
    controller: ControllerSettings = ControllerSettings()
    """How much work is in flight and how old it may get."""
    algorithm: AlgorithmSettings = DecoupledPPO()
    """Advantages and the loss."""
    trainer: TrainerSettings = TrainerSettings()
    """The optimizer and its checkpoints."""
    workflow: WorkflowSettings = SingleTurn()
    """What an episode is: a workflow's name and its own settings."""
    rewards: tuple[RewardSettings, ...] = Field((RewardSettings(),), strict=False)
    """Each `[[rewards]]` table is one; the reward of a completion is their weighted sum. None by
    default where an agent gives the rewards."""
    pass_threshold: float = Field(PASS_THRESHOLD, allow_inf_nan=False)
    """A completion passes if its reward is above this: verdicts, pass rates, reports."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How held-out prompts are answered, and how often."""
    weights: WeightsSettings = WeightsSettings()
    """How a policy's weights travel from the trainer to the generators."""
    cluster: ClusterSettings = ClusterSettings()
    """Worker processes."""
    tracking: TrackingSettings = TrackingSettings()
    """MLflow."""

    @model_validator(mode="after")
    def _with_decay_steps(self) -> Recipe:
        """Fix when a decay ends: a resume may change `num_steps`, and a replay must not notice."""
        trainer = self.trainer
        if (
            trainer.learning_rate_schedule != "constant"
            and not trainer.num_learning_rate_decay_steps
        ):
            last = {"num_learning_rate_decay_steps": self.num_steps}
            object.__setattr__(self, "trainer", trainer.model_copy(update=last))
        return self

    @model_validator(mode="after")
    def _without_idle_reward(self) -> Recipe:
        """Take the default reward away where an agent gives the rewards; refuse any other."""
        if not self._is_rewarded_by_agent:
            return self
        if self.rewards == (RewardSettings(),):
            object.__setattr__(self, "rewards", ())
        require(
            not self.rewards,
            f"rewards: nothing asks {[reward.verifier for reward in self.rewards]}, since the "
            "agent gives the rewards; set rewards = [], or workflow.missing_reward = 'score' to "
            "have them score what the agent leaves",
        )
        return self

    @property
    def _is_rewarded_by_agent(self) -> bool:
        return isinstance(self.workflow, Agent) and self.workflow.missing_reward != "score"

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        require(
            bool(self.rewards) or self._is_rewarded_by_agent,
            "rewards: expected at least one, found none; name one, or take an agent as the "
            "workflow, which gives rewards of its own",
        )
        rewards = [(reward.verifier, reward.settings, reward.sources) for reward in self.rewards]
        twice = [one[0] for place, one in enumerate(rewards) if one in rewards[:place]]
        require(not twice, f"rewards: {twice} named twice with the same settings and sources")
        self._check_sources()
        self._check_trainer_ranks()
        require(
            self.algorithm.num_minibatches <= self.groups_per_step,
            f"algorithm.num_minibatches ({self.algorithm.num_minibatches}) must not exceed the "
            f"{self.groups_per_step} groups of a batch",
        )
        size = self.controller.group_size
        require(
            size > 1 or not self.algorithm.compares_groups,
            f"controller.group_size ({size}) must be at least 2: with algorithm.advantage "
            f"({self.algorithm.advantage}) and algorithm.group_filter "
            f"({self.algorithm.group_filter}) a group of one teaches nothing; set the advantage to "
            "'batch_norm' and the filter to 'all', or ask for larger groups",
        )
        require(
            self.algorithm.proximal != "interpolated"
            or (self.schedule == "async" and self.controller.max_staleness > 0),
            "algorithm.proximal 'interpolated' is for tokens of older policies: where there are "
            f"none (schedule {self.schedule!r}, controller.max_staleness "
            f"{self.controller.max_staleness}) it is the policy that sampled, which makes it plain "
            "PPO; set algorithm.name to 'ppo', or algorithm.proximal to 'recomputed'",
        )
        first, _ = self.algorithm.overlong_tokens or (0, 0)
        require(
            not self.generation.max_model_len or first < self.generation.max_model_len,
            f"algorithm.overlong_tokens begins at {first}, beyond every sequence of "
            f"generation.max_model_len ({self.generation.max_model_len}): no reward would change",
        )
        require(
            self.evaluation.min_new_tokens <= self.generation.max_new_tokens,
            f"evaluation.min_new_tokens ({self.evaluation.min_new_tokens}) must not exceed "
            f"generation.max_new_tokens ({self.generation.max_new_tokens})",
        )
        require(
            self.trainer.tokens_per_micro_batch >= self.generation.max_model_len,
            f"trainer.tokens_per_micro_batch ({self.trainer.tokens_per_micro_batch}) must hold one "
            f"sequence of generation.max_model_len ({self.generation.max_model_len})",
        )
        require(
            not isinstance(self.workflow, ToolUse)
            or self.prompts.chat_template
            or self.workflow.call_end in self.generation.stop.strings,
            f"workflow.name = 'tool_use' needs generation.stop.strings = "
            f'["{getattr(self.workflow, "call_end", "")}"]: what ends a call must end a completion',
        )
        require(
            not isinstance(self.workflow, Agent) or self.prompts.chat_template is not False,
            "workflow.name = 'agent' needs prompts.chat_template = true: an agent sends messages",
        )
        require(
            self.weights.medium != "shared_memory" or self.cluster.is_one_machine,
            "weights.medium = 'shared_memory' reaches this machine's workers only, and "
            f"cluster.launcher = {self.cluster.launcher!r} with cluster.network.host = "
            f"{self.cluster.network.host!r} lets others join; set it to 'auto', 'directory' or "
            "'broadcast'",
        )
        return self

    def _check_trainer_ranks(self) -> None:
        """Refuse what ranks are to share and cannot."""
        trainer, num_trainers = self.trainer, self.cluster.num_trainers
        require(
            trainer.backend != "fsdp" or num_trainers > 1,
            f"trainer.backend 'fsdp' shares a policy among ranks: cluster.num_trainers must be at "
            f"least 2, found {num_trainers}; set it, or the backend to 'replicated'",
        )
        require(
            not self.algorithm.needs_critic
            or (trainer.backend, trainer.lora.rank, trainer.parallel.context_ranks)
            == ("replicated", 0, 1),
            f"algorithm.name {self.algorithm.name!r} trains a critic, which each rank holds whole: "
            "trainer.backend must be 'replicated', trainer.lora.rank 0 and "
            "trainer.parallel.context_ranks 1; take an algorithm without a critic, or leave these",
        )
        context = trainer.parallel.context_ranks
        require(
            num_trainers % context == 0,
            f"trainer.parallel.context_ranks ({context}) must divide cluster.num_trainers "
            f"({num_trainers}): so many ranks share the tokens of a micro-batch",
        )

    def _check_sources(self) -> None:
        """Refuse sources that are alike, that no reward judges, or beside a file of prompts."""
        names = [source.name for source in self.sources]
        require(len(set(names)) == len(names), f"sources: a name is given twice in {names}")
        require(
            not names or self.prompts.path is None,
            f"prompts.path ({self.prompts.path}) and [[sources]] are two ways to say the same: "
            "make the file one of the sources",
        )
        if not self.rewards:
            return
        names += [each.name for each in self.evaluation.held_out]
        for reward in self.rewards:
            unknown = sorted(set(reward.sources) - set(names))
            require(
                not unknown,
                f"rewards: sources of {reward.verifier!r} name {unknown}, expected of {names}",
            )
        require(
            bool(self.sources) or any(not reward.sources for reward in self.rewards),
            "rewards: one must judge the prompts to train on; leave its sources out",
        )
        for name in names:
            judged = any(name in (reward.sources or names) for reward in self.rewards)
            require(judged, f"sources: no reward judges {name!r}; add it to one's sources")

    def by_source(self) -> dict[str, Recipe]:
        if not self.sources:
            return {"": self}
        return {source.name: self._of_source(source) for source in self.sources}

    def of_set(self, held_out: HeldOutSettings) -> Recipe:
        """Return the recipe by which a held-out set is read and judged: a source's of its name."""
        of = self.by_source().get(held_out.name, self) if self.sources else self
        prompts = of.prompts.model_copy(update=held_out.over_prompts())
        rewards = tuple(r for r in of.rewards if not r.sources or held_out.name in r.sources)
        return of.model_copy(update={"prompts": prompts, "rewards": rewards})

    def _of_source(self, source: SourceSettings) -> Recipe:
        given = source.model_dump(exclude={"name", "weight", "settings"}, exclude_none=True)
        rewards = tuple(r for r in self.rewards if not r.sources or source.name in r.sources)
        return self.model_copy(
            update={"prompts": self.prompts.model_copy(update=given), "rewards": rewards}
        )

    @property
    def has_held_out(self) -> bool:
        return bool(self.prompts.num_held_out or self.evaluation.held_out)

    @property
    def groups_per_step(self) -> int:
        return self.controller.batch_size // self.controller.group_size

    @property
    def weights_medium(self) -> Medium:
        """Return the medium as far as settings decide it: auto is a matter of one machine."""
        medium = self.weights.medium
        return "directory" if medium == "auto" and not self.cluster.is_one_machine else medium

    def digest(self) -> str:
        """Return the identity of these settings, for the ledger.

        How long to train is left out: a resume may change it, and no step depends on it.
        """
        settings = self.model_dump_json(exclude={"num_steps", "max_minutes"})
        return hashlib.sha256(settings.encode()).hexdigest()[:16]


def load_recipe(
    path: Path, overrides: dict[str, Any] | None = None, *, spelling: str = "{}"
) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table.

    Args:
        spelling: how the overrides were given, for messages: see `config_errors`.
    """
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"expected a recipe at {path}, found no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    overrides = overrides or {}
    for section, default in (("algorithm", "decoupled_ppo"), ("workflow", "single_turn")):
        chosen = overrides.get(section, {}).get("name")
        if chosen not in (None, table.get(section, {}).get("name", default)):
            table.pop(section, None)  # the settings of another one
    return build_recipe(table, overrides, source=str(path), spelling=spelling)


def build_recipe(
    table: dict[str, Any],
    overrides: dict[str, Any] | None = None,
    *,
    source: str,
    spelling: str = "{}",
) -> Recipe:
    """Validate a nested table with overrides; see `load_recipe`."""
    given = overrides or {}
    try:
        return Recipe.model_validate(merge(table, given))
    except ValidationError as error:
        if given and _is_recipe(table):
            source = ""  # without the overrides all would be well
        message = explain(error, Recipe, source=source, given=flatten(given), spelling=spelling)
        raise ConfigError(message) from None


def _is_recipe(table: dict[str, Any]) -> bool:
    try:
        Recipe.model_validate(table)
    except ValidationError:
        return False
    return True


def dump_recipe(recipe: Recipe) -> str:
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))
