"""The settings of a recipe, each with its type, default and meaning, and how a recipe is read.

Unknown keys, wrong types and impossible combinations fail, naming field, value and rule. Anything
here can be overridden by its dotted name: `--trainer.learning-rate 1e-5`. The line under a field is
its meaning, which `areal-flow train --help` and docs/settings.md show.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, ValidationError, model_validator

from areal_flow.algorithms.decoupled_ppo import DecoupledPPO
from areal_flow.algorithms.registry import AlgorithmSettings
from areal_flow.config_errors import explain
from areal_flow.errors import ConfigError
from areal_flow.settings import Settings, require
from areal_flow.workflows.registry import WorkflowSettings
from areal_flow.workflows.single_turn import SingleTurn


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class PromptSettings(Settings):
    """Where prompts come from and how they are put to the policy."""

    source: str = "arithmetic"
    """`file`, or the name of a source that makes prompts: `arithmetic`."""
    path: Path | None = Field(None, strict=False)
    """JSONL or Parquet, one prompt a row, for the source `file`."""
    held_out_path: Path | None = Field(None, strict=False)
    """Held-out prompts in a file of their own; otherwise drawn from `path`."""
    question_field: str = "question"
    """The field of a row that has the question."""
    answer_field: str = "answer"
    """The field of a row that has the right answer."""
    template: str = "{question}"
    """What the policy is given; `{question}` stands for the question."""
    num_prompts: int = Field(24_000, ge=1)
    """How many prompts a source makes; a file is read whole."""
    num_held_out: int = Field(1024, ge=0)
    """How many prompts are never trained on, at most a fifth of a file; 0: no evaluation."""
    min_terms: int = Field(3, ge=2)
    """The fewest terms of a sum, for the source `arithmetic`."""
    max_terms: int = Field(7, ge=2)
    """The most terms of a sum, for the source `arithmetic`."""
    skip_bad_rows: bool = False
    """Leave out and list rows that are wrong, instead of ending there."""

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


class SftSettings(Settings):
    """Supervised fine-tuning on prompts with their completions, before reinforcement learning.

    The rest of its optimizer, the passes' type and the device are those of `trainer`.
    """

    path: Path | None = Field(None, strict=False)
    """JSONL rows with `prompt` and `completion`; the model `tiny` brings its own."""
    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0: no supervised fine-tuning."""
    batch_size: int = Field(64, ge=1)
    """Rows a step."""
    learning_rate: float = Field(1e-5, gt=0)
    """The peak rate."""
    num_learning_rate_warmup_steps: int = Field(30, ge=0)
    """Steps of linear warm-up."""
    learning_rate_schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: a cosine down to 3% of the peak, or constant."""
    shuffle: bool = True
    """Another order every epoch, drawn from the seed; false: the file's own, a curriculum."""
    checkpoint_every_steps: int = Field(500, ge=1)
    """Steps between checkpoints, from which a stopped run goes on."""


class GenerationSettings(Settings):
    """The engine of each generator, and how completions are drawn."""

    engine: str = "torch"
    """Which engine samples: a name of `areal_flow.generation.registry.ENGINES`."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits before sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that have this probability together; 1: from all."""
    top_k: int = Field(0, ge=0)
    """Sample from so many likeliest tokens; 0: from all."""
    max_new_tokens: int = Field(64, ge=1)
    """The longest completion, in tokens."""
    max_model_len: int = Field(128, ge=2)
    """The longest prompt with its completion, in tokens."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences that one generator decodes at a time."""
    interruption: Literal["interrupt", "keep", "drain"] = "interrupt"
    """New weights: re-prefill and go on, keep the old cache, or finish first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the served weights and the engine."""
    device: str = "cpu"
    """Of the engines, as torch names it."""

    @model_validator(mode="after")
    def _fits(self) -> GenerationSettings:
        require(
            self.max_new_tokens < self.max_model_len,
            f"generation.max_new_tokens ({self.max_new_tokens}) must leave room for a prompt in "
            f"max_model_len ({self.max_model_len})",
        )
        return self


class ControllerSettings(Settings):
    """How much work is in flight and how old it may get. Sizes in trajectories."""

    batch_size: int = Field(512, ge=1)
    """Trajectories a training step."""
    group_size: int = Field(16, ge=1)
    """Completions of one prompt."""
    max_staleness: int = Field(2, ge=0)
    """The oldest token that may train, in policy versions before the current one."""
    max_attempts: int = Field(3, ge=1)
    """How often a group is tried before it is given up."""
    max_consecutive_failures: int = Field(4, ge=1)
    """So many groups that fail in a row end the run."""

    @model_validator(mode="after")
    def _whole_groups(self) -> ControllerSettings:
        require(
            self.batch_size % self.group_size == 0,
            f"controller.group_size ({self.group_size}) must divide "
            f"controller.batch_size ({self.batch_size})",
        )
        return self


class TrainerSettings(Settings):
    """The optimizer and its checkpoints. Master weights are float32; `dtype` is of the passes."""

    backend: Literal["replicated"] = "replicated"
    """What holds the policy: replicated is a whole copy of it on each rank."""
    learning_rate: float = Field(3e-4, gt=0)
    """The rate of AdamW after the warm-up."""
    num_learning_rate_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the squared gradient."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Packed tokens of one forward and backward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the passes; the master weights stay float32."""
    device: str = "cpu"
    """Of the trainer, as torch names it."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(3, ge=1)
    """So many newest checkpoints are kept, and that of step 0."""


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A name of the registry, an import path `package.module:function`, or a shipped function."""
    weight: float = 1.0
    """What this reward is multiplied by in the sum."""
    timeout_s: float = Field(60.0, gt=0)
    """A verifier function that takes longer over one completion hangs, and has failed there."""


class NetworkSettings(Settings):
    """Where the scheduler and the workers listen. Beyond this machine they do so with TLS only."""

    host: str = "127.0.0.1"
    """The address of this machine at which the scheduler listens."""
    tls_ca: Path | None = Field(None, strict=False)
    """The certificate of the authority that signed those of all workers, as PEM."""
    tls_certificate: Path | None = Field(None, strict=False)
    """The certificate that this run's processes show each other, as PEM."""
    tls_key: Path | None = Field(None, strict=False)
    """The private key of `tls_certificate`, as PEM without a passphrase."""

    @model_validator(mode="after")
    def _encrypted(self) -> NetworkSettings:
        files = (self.tls_ca, self.tls_certificate, self.tls_key)
        require(
            all(files) or not any(files),
            "cluster.network: tls_ca, tls_certificate and tls_key belong together; set all or none",
        )
        require(
            self.has_tls or is_loopback(self.host),
            f"cluster.network.host = {self.host!r} needs TLS: whoever reaches the scheduler's port "
            "can run any code; set tls_ca, tls_certificate and tls_key, or host to 127.0.0.1",
        )
        return self

    @property
    def has_tls(self) -> bool:
        return self.tls_ca is not None


class RemoteSettings(Settings):
    """Other machines for the workers; each has this project and sees the same run directory."""

    hosts: tuple[str, ...] = Field((), strict=False)
    """What `ssh` calls them, such as `me@10.0.0.7`; workers are spread over all."""
    python: str = ""
    """The Python program of the project's environment on each host; the driver's by default."""
    directory: str = ""
    """Where workers start on each host; the driver's own working directory by default."""
    ssh_options: tuple[str, ...] = Field((), strict=False)
    """More arguments for `ssh`, such as `-i` and a key's file."""


class ClusterSettings(Settings):
    """Worker processes; with one thread each, results do not depend on their number."""

    num_generators: int = Field(1, ge=1)
    """Worker processes that generate."""
    threads_per_worker: int = Field(1, ge=1)
    """Threads of the numbers in a generator."""
    num_trainers: int = Field(1, ge=1)
    """Trainer ranks, one process each."""
    num_trainer_threads: int = Field(1, ge=1)
    """Threads of the numbers in a trainer rank."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs of each machine; those of this machine are found by default."""
    launcher: str = "local"
    """How worker processes start: `local`, on this machine, or `ssh`, on `remote.hosts`."""
    remote: RemoteSettings = RemoteSettings()
    """Other machines for the workers."""
    network: NetworkSettings = NetworkSettings()
    """Where the scheduler and the workers listen."""
    num_reward_workers: int = Field(1, ge=1)
    """Worker processes that score completions and call tools."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """Of Dask's dashboard on 127.0.0.1; 0: any free one."""
    silent_after_s: float = Field(10.0, ge=1)
    """A worker that shows no sign of life or work for so long is hung."""
    worker_ttl_s: float = Field(60.0, gt=0)
    """Dask gives up a worker that it has not heard of for so long."""

    @model_validator(mode="after")
    def _reachable(self) -> ClusterSettings:
        require(
            self.launcher != "local" or not self.remote.hosts,
            f"cluster.launcher = 'local' starts workers on this machine only, but "
            f"cluster.remote.hosts = {list(self.remote.hosts)}; set launcher to 'ssh'",
        )
        far = [host for host in self.remote.hosts if not is_loopback(host.rpartition("@")[2])]
        require(
            not far or not is_loopback(self.network.host),
            f"cluster.network.host = {self.network.host!r} cannot be reached from {far}; set it to "
            "this machine's address in their network, with TLS",
        )
        return self


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
    """A model directory, a hub name, or a model made here: `tiny`."""
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
    rewards: tuple[RewardSettings, ...] = Field((RewardSettings(),), min_length=1, strict=False)
    """Each `[[rewards]]` table is one; the reward of a completion is their weighted sum."""
    cluster: ClusterSettings = ClusterSettings()
    """Worker processes."""
    tracking: TrackingSettings = TrackingSettings()
    """MLflow."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [reward.verifier for reward in self.rewards]
        require(len(set(names)) == len(names), f"rewards: a verifier is named twice in {names}")
        require(
            self.algorithm.num_minibatches <= self.groups_per_step,
            f"algorithm.num_minibatches ({self.algorithm.num_minibatches}) must not exceed the "
            f"{self.groups_per_step} groups of a batch",
        )
        require(
            self.generation.top_p == 1 and not self.generation.top_k,
            f"generation.top_p ({self.generation.top_p}) must be 1 and top_k "
            f"({self.generation.top_k}) 0 in training: behaviour log-probabilities would be those "
            "of the truncated distribution, the trainer's those of the whole one, and importance "
            "weights would be biased (a mean of 0.9 instead of 1 at top_p 0.9)",
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


def load_recipe(
    path: Path, overrides: dict[str, Any] | None = None, *, spelling: str = "{}"
) -> Recipe:
    """Read a TOML recipe and apply overrides, a nested table.

    Args:
        spelling: how the overrides were given, for messages: see `config_errors`.

    Raises:
        ConfigError: naming every field that is wrong, its value and the rule.
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
    """Return the whole recipe as TOML, defaults written out."""
    return tomlkit.dumps(recipe.model_dump(mode="json", exclude_none=True))


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn settings by dotted name, `{"trainer.learning_rate": 1e-5}`, into a nested table."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, rest = name.partition(".")
        inner = nest(value) if isinstance(value, Mapping) else value
        table = merge(table, {section: nest({rest: value}) if rest else inner})
    return table


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn a nested table into settings by dotted name: the reverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Turn `SECTION.SETTING=VALUE` texts into a nested table."""
    pairs = (text.partition("=") for text in texts)
    return nest({name.replace("-", "_"): parse_value(value) for name, _, value in pairs})


def parse_value(text: str) -> Any:
    """Return a TOML value, or the text as it is: validation says what it must be."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a nested table with another one's values where it has any."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = (
            merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged
