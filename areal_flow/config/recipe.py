"""A recipe: the settings of a whole run, and which of them fit together."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from areal_flow.algorithms.registry import AlgorithmSettings, DecoupledPPO
from areal_flow.config.cluster import ClusterSettings
from areal_flow.config.devices import with_devices
from areal_flow.core.digests import sha256_hex
from areal_flow.core.pass_rates import HELD_OUT, PASS_THRESHOLD
from areal_flow.core.settings import Settings, require
from areal_flow.policy.settings import Medium, WeightsSettings
from areal_flow.rewards.protocol import RewardSettings
from areal_flow.rollout.engines.protocol import LORA_RANKS, WHOLE_DISTRIBUTION, GenerationSettings
from areal_flow.rollout.engines.registry import choose_engine
from areal_flow.rollout.prompts.settings import (
    HeldOutSettings,
    PromptPlan,
    PromptSettings,
    RowSettings,
    SourceSettings,
)
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.episode import TimedWorkflow
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.registry import WorkflowSettings
from areal_flow.rollout.workflows.sandbox_task import SandboxTask
from areal_flow.rollout.workflows.tool_use import WithTools
from areal_flow.rollout.workflows.turns import SingleTurn
from areal_flow.training.settings import RankSettings, SftSettings, TrainerSettings


class ControllerSettings(Settings):
    """How much work is in flight and how old it may get. Sizes in trajectories."""

    batch_size: int = Field(512, ge=1)
    """Trajectories per training step."""
    group_size: int = Field(16, ge=1)
    """Completions per prompt."""
    max_staleness: int = Field(2, ge=0)
    """Maximum age of a trained token, in policy versions."""
    exact_staleness: int | None = Field(None, ge=0)
    """For studies: each batch is sampled by the policy of exactly this many versions before (by
    version 0 until there are so many), and generation waits for training. Unset: whatever is
    ready, up to `max_staleness`."""
    max_attempts: int = Field(3, ge=1)
    """Maximum attempts per group, in generation and scoring together."""
    max_consecutive_failures: int = Field(4, ge=1)
    """End the run after this many failed groups in a row, in order of submission."""

    @model_validator(mode="after")
    def _whole_groups(self) -> ControllerSettings:
        require(
            self.batch_size % self.group_size == 0,
            f"controller.group_size ({self.group_size}) must divide "
            f"controller.batch_size ({self.batch_size})",
        )
        require(
            (self.exact_staleness or 0) <= self.max_staleness,
            f"controller.exact_staleness ({self.exact_staleness}) must not exceed "
            f"controller.max_staleness ({self.max_staleness}), above which tokens are discarded",
        )
        return self


class EvaluationSettings(Settings):
    """How held-out prompts are answered, and how often."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before and after training."""
    num_samples: int = Field(1, ge=1)
    """Answers per prompt; more than one gives pass@k."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0: greedy; none: that of `generation`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Minimum probability relative to the most likely token; 0: off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Penalty on tokens that occurred before; 1: off."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum length of an answer, in tokens."""
    early_stopping_patience: int = Field(0, ge=0)
    """Stop training after this many evaluations without a better pass rate; 0: never."""
    held_out: tuple[HeldOutSettings, ...] = Field((), strict=False)
    """Each `[[evaluation.held_out]]` table is one more held-out set, with a name and a `path`. It
    may have `question_field`, `answer_field` and `template`; else those of `[prompts]`."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        names = [HELD_OUT, *(each.name for each in self.held_out)]
        require(
            len(set(names)) == len(names),
            f"evaluation.held_out: a name stands twice in {names}, the first of which is the set "
            "that training's own prompts give: rename one",
        )
        of_sets = {f"evaluation.held_out {s.name!r}: ": s.num_samples for s in self.held_out}
        for where, number in {"evaluation.": self.num_samples, **of_sets}.items():
            require(
                self.temperature != 0 or number in (1, None),
                f"{where}num_samples ({number}) must be 1 at evaluation.temperature 0: the "
                "likeliest answer is always the same",
            )
        require(
            not self.early_stopping_patience or self.every_steps > 0,
            f"evaluation.early_stopping_patience ({self.early_stopping_patience}) needs "
            "evaluations during training: set evaluation.every_steps",
        )
        return self

    def num_samples_of(self, held_out: str) -> int:
        own = next((each.num_samples for each in self.held_out if each.name == held_out), None)
        return own or self.num_samples

    def sampling(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in WHOLE_DISTRIBUTION}
        return own if self.temperature is None else {**own, "temperature": self.temperature}


class TrackingSettings(Settings):
    """Where a run is shown. MLflow: a database beside the runs unless an address is given."""

    enabled: bool = True
    """Send metrics and models to the tracking sinks."""
    sink: str = "mlflow"
    """`mlflow`, `tensorboard`, `wandb` (offline), or several: `mlflow,tensorboard`."""
    uri: str = ""
    """Address of the MLflow server, without a password; empty: a database next to the runs."""
    experiment: str = "areal-flow"
    """Name of the MLflow experiment."""
    registered_model: str = "areal-flow"
    """Name of the registered model."""

    @property
    def sinks(self) -> list[str]:
        return [name.strip() for name in self.sink.split(",")]

    @model_validator(mode="after")
    def _without_secrets(self) -> TrackingSettings:
        require(
            urlsplit(self.uri).password is None,
            "tracking.uri has a password, which the run's files would keep: leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        )
        return self


class LogSettings(Settings):
    keep_tokens_of: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    """For how many steps trajectories keep their completion's tokens and log-probabilities after
    the step that consumed them; `all`: for ever. Steps without tokens cannot be replayed. Tokens
    of steps after the oldest kept checkpoint, that of step 0 aside, stay."""


class Recipe(Settings):
    """Everything a run is made of."""

    model: str = "tiny"
    """A model directory, a hub name, or a tiny model: `tiny`, `tiny_calculator`, `tiny_coder`
    (write `./tiny` for a directory of that name)."""
    seed: int = Field(0, ge=0)
    """The seed of everything random."""
    num_steps: int = Field(90, ge=0)
    """Training steps."""
    max_minutes: float | None = Field(None, gt=0)
    """Stop training after this many minutes."""
    schedule: Literal["async", "sync"] = "async"
    """`async`: generate while training; `sync`: take turns."""
    prompts: PromptSettings = PromptSettings()
    """Where prompts come from and how they are rendered."""
    sources: tuple[SourceSettings, ...] = Field((), strict=False)
    """Each `[[sources]]` table is one of several sources, mixed by weight. It may have `source`
    (default `file`), `path`, `held_out_path`, `question_field`, `answer_field`, `template`,
    `num_prompts` and `num_held_out`; else those of `[prompts]`."""
    sft: SftSettings = SftSettings()
    """Supervised fine-tuning before reinforcement learning."""
    generation: GenerationSettings = GenerationSettings()
    """The inference engine and the sampling of completions."""
    controller: ControllerSettings = ControllerSettings()
    """Batch size, staleness and retries."""
    algorithm: AlgorithmSettings = DecoupledPPO()
    """Advantages and the loss."""
    trainer: TrainerSettings = TrainerSettings()
    """The optimizer and checkpoints."""
    workflow: WorkflowSettings = SingleTurn()
    """A workflow and its own settings."""
    rewards: tuple[RewardSettings, ...] = Field((RewardSettings(),), strict=False)
    """Each `[[rewards]]` table, or name of a verifier, is one; a completion's reward is their
    weighted sum. None by default where the workflow gives the rewards."""
    pass_threshold: float = Field(PASS_THRESHOLD, allow_inf_nan=False)
    """A completion passes if its reward is above this."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Evaluation on held-out prompts."""
    weights: WeightsSettings = WeightsSettings()
    """How weights get from the trainer to the generators."""
    log: LogSettings = LogSettings()
    """The log of trajectories."""
    cluster: ClusterSettings = ClusterSettings()
    """Worker processes."""
    tracking: TrackingSettings = TrackingSettings()
    """MLflow."""

    @model_validator(mode="before")
    @classmethod
    def _with_devices(cls, given: Any) -> Any:
        return with_devices(given)

    @field_validator("rewards", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Accept the name of a verifier as a reward."""
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple):
            return given
        return [{"verifier": each} if isinstance(each, str) else each for each in listed]

    @model_validator(mode="after")
    def _with_decay_steps(self) -> Recipe:
        """Fix the end of the decay: a resume may change `num_steps`, but a replay must repeat."""
        trainer = self.trainer
        if trainer.learning_rate_schedule != "constant" and not trainer.num_decay_steps:
            decaying = trainer.model_copy(update={"num_decay_steps": self.num_steps})
            object.__setattr__(self, "trainer", decaying)
        return self

    @model_validator(mode="after")
    def _with_sleep_mode(self) -> Recipe:
        if self.takes_turns and choose_engine(self.generation).name == "vllm":
            vllm = self.generation.vllm.model_copy(update={"enable_sleep_mode": True})
            generation = self.generation.model_copy(update={"vllm": vllm})
            object.__setattr__(self, "generation", generation)
        return self

    @model_validator(mode="after")
    def _without_idle_reward(self) -> Recipe:
        """Drop the default reward where the workflow gives the rewards; refuse any other."""
        if not self.workflow_gives_rewards:
            return self
        if self.rewards == (RewardSettings(),):
            object.__setattr__(self, "rewards", ())
        advice = "set rewards = []"
        if not self.environment:
            advice += (
                ", or workflow.missing_reward = 'score' to have them score what the agent leaves"
            )
        require(
            not self.rewards,
            f"rewards: nothing asks {[reward.verifier for reward in self.rewards]}, since the "
            f"{self.workflow.name} gives the rewards; {advice}",
        )
        return self

    @property
    def workflow_gives_rewards(self) -> bool:
        return isinstance(self.workflow, TimedWorkflow) and self.workflow.gives_rewards

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        require(
            bool(self.rewards) or self.workflow_gives_rewards,
            "rewards: expected at least one, found none; name one, or take a workflow that gives "
            "rewards of its own, such as an agent",
        )
        rewards = [(reward.verifier, reward.settings, reward.sources) for reward in self.rewards]
        repeated = [each[0] for place, each in enumerate(rewards) if each in rewards[:place]]
        require(not repeated, f"rewards: {repeated} named twice with the same settings and sources")
        require(
            self.schedule == "async" or not self.controller.exact_staleness,
            f"controller.exact_staleness ({self.controller.exact_staleness}): schedule = 'sync' "
            "trains what the newest policy sampled; set schedule to 'async'",
        )
        self._check_sources()
        self._check_served_adapter()
        self._check_trainer_ranks()
        self._check_algorithm()
        self._check_lengths()
        self._check_workflow()
        require(
            not (self.evaluation.min_p and self.generation.vllm.speculation),
            f"evaluation.min_p ({self.evaluation.min_p}): vLLM does not support it with "
            "generation.vllm.engine_args.speculative_config: leave either out",
        )
        require(
            self.weights.medium != "shared_memory" or self.cluster.is_one_machine,
            "weights.medium = 'shared_memory' reaches this machine's workers only, and "
            f"cluster.launcher = {self.cluster.launcher!r} with cluster.network.host = "
            f"{self.cluster.network.host!r} lets others join; set it to 'auto' or "
            "'directory'",
        )
        return self

    def _check_algorithm(self) -> None:
        require(
            self.algorithm.num_minibatches <= self.groups_per_step,
            f"algorithm.num_minibatches ({self.algorithm.num_minibatches}) must not exceed the "
            f"number of groups in a batch ({self.groups_per_step}): lower it, or raise "
            "controller.batch_size",
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

    def _check_lengths(self) -> None:
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

    def _check_workflow(self) -> None:
        require(
            not isinstance(self.workflow, WithTools)
            or self.prompts.chat_template
            or self.workflow.call_end in self.generation.stop.strings,
            f"workflow.name = {self.workflow.name!r} needs generation.stop.strings = "
            f'["{getattr(self.workflow, "call_end", "")}"]: what ends a call must end a completion',
        )
        require(
            not isinstance(self.workflow, Agent) or self.prompts.chat_template is not False,
            "workflow.name = 'agent' needs prompts.chat_template = true: an agent sends messages",
        )
        has_mcp = isinstance(self.workflow, OpenEnv) and self.workflow.mcp
        require(
            not has_mcp or self.prompts.chat_template is not False,
            "workflow.mcp needs prompts.chat_template = true: a chat template shows tools",
        )

    def _check_served_adapter(self) -> None:
        if not self.generation.vllm.serves_adapter:
            return
        name, rank = "generation.vllm.engine_args.enable_lora", self.trainer.lora.rank
        require(
            self.generation.engine == "vllm",
            f"{name} needs generation.engine = 'vllm', found {self.generation.engine!r}",
        )
        require(
            0 < rank <= LORA_RANKS[-1],
            f"{name} needs an adapter of rank 1 to {LORA_RANKS[-1]}, found trainer.lora.rank = "
            f"{rank}: leave it out, and engines get merged weights",
        )

    def _check_trainer_ranks(self) -> None:
        trainer, num_trainers = self.trainer, self.cluster.num_trainers
        require(
            not (self.algorithm.needs_critic and trainer.lora.rank),
            f"algorithm.name {self.algorithm.name!r} trains a critic of the policy's layers: "
            "trainer.lora.rank must be 0; take an algorithm without a critic, or leave the adapter",
        )
        for name, shared in (("context", "the tokens of a micro-batch"), ("shard", "a copy")):
            num_ranks = getattr(trainer.parallel, f"{name}_ranks")
            require(
                num_trainers % (num_ranks or num_trainers) == 0,
                f"trainer.parallel.{name}_ranks ({num_ranks}) must divide cluster.num_trainers "
                f"({num_trainers}): so many ranks share {shared}",
            )

    def _check_sources(self) -> None:
        """Refuse duplicate sources, sources without a reward, and sources with `prompts.path`."""
        names = [source.name for source in self.sources]
        require(len(set(names)) == len(names), f"sources: a name is given twice in {names}")
        require(
            not names or self.prompts.path is None,
            f"prompts.path ({self.prompts.path}) and [[sources]] are two ways to say the same: "
            "make the file one of the sources",
        )
        for name, part in self.by_source().items():
            of, where = part.prompts, f"sources {name!r}: " if name else "prompts."
            for setting in ("path", "held_out_path"):
                require(
                    of.source == "file" or getattr(of, setting) is None,
                    f"{where}{setting} ({getattr(of, setting)}) would not be read, since source is "
                    f"{of.source!r}: leave one of them out, or name a held-out file in "
                    "[[evaluation.held_out]]",
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
        return {source.name: self._of(source) for source in self.sources} or {"": self}

    def of_set(self, held_out: HeldOutSettings) -> Recipe:
        """Return the recipe of a held-out set: that of the source of its name, if there is one."""
        return self.by_source().get(held_out.name, self)._of(held_out)

    def _of(self, rows: SourceSettings | HeldOutSettings) -> Recipe:
        """Return the recipe with these rows as the only ones."""
        prompts = self.prompts.model_copy(update=rows.over_prompts())
        rewards = tuple(r for r in self.rewards if not r.sources or rows.name in r.sources)
        return self.model_copy(update={"prompts": prompts, "rewards": rewards})

    @property
    def rewarding_agent(self) -> str:
        """The import path of an agent, which may give rewards itself; empty: no agent."""
        return self.workflow.path if isinstance(self.workflow, Agent) else ""

    @property
    def environment(self) -> str:
        """What gives the rewards but an agent: a server, or tasks' own tests; empty: neither."""
        if isinstance(self.workflow, OpenEnv):
            return f"openenv:{self.workflow.server}"
        return "tests" if isinstance(self.workflow, SandboxTask) else ""

    @property
    def function_paths(self) -> tuple[str, ...]:
        """The names and import paths of verifiers, an agent and tools."""
        tools = self.workflow.tools if isinstance(self.workflow, WithTools) else ()
        return (*(each.verifier for each in self.rewards), self.rewarding_agent, *tools)

    def prompt_plan(self) -> PromptPlan:
        held_out = self.evaluation.held_out
        return PromptPlan(
            rows=self._rows(),
            sources={name: part._rows() for name, part in self.by_source().items()},
            shares={source.name: source.weight for source in self.sources} or {"": 1.0},
            held_out=[(each, self.of_set(each)._rows()) for each in held_out],
            workflow=self.workflow,
            model=self.model,
            max_model_len=self.generation.max_model_len,
            max_new_tokens=self.generation.max_new_tokens,
            seed=self.seed,
        )

    def _rows(self) -> RowSettings:
        return RowSettings(self.prompts, frozenset(each.verifier for each in self.rewards))

    @property
    def has_held_out(self) -> bool:
        return bool(self.prompts.num_held_out or self.evaluation.held_out)

    @property
    def shares_gpu(self) -> bool:
        """Whether a trainer and a generator are on the one GPU of one machine."""
        on_gpus = self.trainer.device == self.generation.device == "cuda"
        return on_gpus and self.cluster.has_one_gpu

    @property
    def takes_turns(self) -> bool:
        """Whether each uses that GPU alone while it works."""
        return self.shares_gpu and self.schedule == "sync"

    @property
    def groups_per_step(self) -> int:
        return self.controller.batch_size // self.controller.group_size

    @property
    def weights_medium(self) -> Medium:
        """The medium, as far as settings decide it: `auto` remains on one machine."""
        medium = self.weights.medium
        return "directory" if medium == "auto" and not self.cluster.is_one_machine else medium

    def for_trainer(self) -> RankSettings:
        return RankSettings(
            trainer=self.trainer,
            algorithm=self.algorithm,
            num_ranks=self.cluster.num_trainers,
            temperature=self.generation.temperature,
            served_dtype=self.generation.dtype,
            serves_adapter=self.generation.vllm.serves_adapter,
            pass_threshold=self.pass_threshold,
            seed=self.seed,
            recipe_digest=self.digest(),
            takes_turns=self.takes_turns,
        )

    def digest(self) -> str:
        """Return a hash of these settings, for the ledger.

        It excludes how long to train, which a resume may change, and prices: no step depends on
        them.
        """
        settings = self.model_dump_json(
            exclude={"num_steps": True, "max_minutes": True, "cluster": {"prices"}}
        )
        return sha256_hex(settings, 16)
