"""The settings of the trainer, of its ranks and of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.protocol import TokenLoss
from areal_flow.core.settings import AUTO, Settings, require
from areal_flow.policy.settings import LoraSettings

Beta = Annotated[float, Field(ge=0, lt=1)]
RateSchedule = Literal["constant", "linear", "cosine"]
SftObjectiveName = Literal["cross_entropy", "dpo", "reward_model"]

FLOOR = 0.03
"""Final learning rate of a decaying schedule, as a fraction of the peak."""


def scheduled_rate(
    peak: float, *, step: int, schedule: RateSchedule, num_warmup_steps: int, num_decay_steps: int
) -> float:
    """Return the rate of step t = 1, 2, ... with a warm-up of W steps and a decay until step D.

    `peak * t / (W + 1)` in the warm-up; then, with the progress `p = (t - 1 - W) / (D - W)`, at
    most 1, `peak * (FLOOR + (1 - FLOOR) * f(p))`, where f is 1 (constant), `1 - p` (linear) or
    `(1 + cos(pi * p)) / 2` (cosine; Loshchilov and Hutter, arXiv 1608.03983, equation 5).

    Args:
        num_decay_steps: D, the warm-up included; every later step has the floor.
    """
    after_warmup = step - 1 - num_warmup_steps
    if after_warmup < 0:
        return peak * (step / (num_warmup_steps + 1))
    if schedule == "constant":
        return peak
    progress = min(1.0, after_warmup / max(1, num_decay_steps - num_warmup_steps))
    left = 1 - progress if schedule == "linear" else 0.5 * (1 + cos(pi * progress))
    return peak * (FLOOR + (1 - FLOOR) * left)


class SftSettings(Settings):
    """Supervised fine-tuning on prompts with their completions, before reinforcement learning.

    The rest of its optimizer, the passes' type and the device are those of `trainer`.
    """

    objective: SftObjectiveName = "cross_entropy"
    """`cross_entropy`: imitate completions; `dpo`: prefer one of two; `reward_model`: score
    them."""
    path: Path | None = Field(None, strict=False)
    """Rows, as `prompts.path`, with `prompt` and `completion`, or with `chosen` and `rejected`, or
    with `messages`; each field a text, a list of texts of policy and environment in turn, or
    messages, with the schemas of their tools in `tools`. A tiny model has its own."""
    num_held_out: int = Field(0, ge=0)
    """Number of rows at the end of the file to hold out and evaluate at each checkpoint."""
    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0: no fine-tuning."""
    batch_size: int = Field(64, ge=1)
    """Rows per step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    num_warmup_steps: int = Field(30, ge=0)
    """Linear warm-up steps."""
    learning_rate_schedule: RateSchedule = "cosine"
    """Schedule after the warm-up: constant, or linear or cosine decay to 3% of the peak."""
    shuffle: bool = True
    """Shuffle each epoch; false: keep the order of the file."""
    checkpoint_every_steps: int = Field(500, ge=1)
    """Steps between checkpoints."""
    beta: float = Field(0.1, gt=0)
    """DPO's beta: strength of the pull towards the initial policy."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that the label of a pair is wrong."""

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

    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    """Decay rates of the first and second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, also for Muon; norms and biases are exempt."""


class ParallelSettings(Settings):
    """Parallelism of trainer ranks."""

    shard_ranks: int = Field(0, ge=0)
    """Trainer ranks that shard one copy of the policy (FSDP2); divides `cluster.num_trainers`. With
    several copies, gradients are summed. 0: all ranks share one copy."""
    context_ranks: int = Field(1, ge=1)
    """Trainer ranks that split the tokens of each micro-batch (Ulysses context parallelism);
    divides `cluster.num_trainers`."""


class TrainerSettings(Settings):
    """The optimizer and its checkpoints. Master weights are float32; `dtype` is of the passes."""

    learning_rate: float = Field(3e-4, gt=0)
    """Learning rate after the warm-up."""
    num_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up steps."""
    learning_rate_schedule: RateSchedule = "constant"
    """Schedule after the warm-up: constant, or linear or cosine decay to 3%."""
    num_decay_steps: int = Field(0, ge=0)
    """Step at which the decay ends; 0: `num_steps`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon`: Muon for the matrices of the layers at the same learning rate, AdamW for
    everything else."""
    adamw: AdamWSettings = AdamWSettings()
    """AdamW."""
    lora: LoraSettings = LoraSettings()
    """A low-rank adapter instead of all weights."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: maximum norm."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Maximum tokens per packed micro-batch."""
    parallel: ParallelSettings = ParallelSettings()
    """Parallelism of trainer ranks."""
    activations: Literal["keep", "selective", "recompute", "offload"] = "keep"
    """`keep` all activations, keep those of matrix products and attention (`selective`),
    `recompute` all but attention's (a third more work), or `offload` those of layers to main
    memory."""
    recomputed_layers: float = Field(1.0, ge=0, le=1)
    """Share of the layers that `recompute` recomputes; the others are `selective`. `areal-flow
    plan` prints the smallest one that fits in a GPU's memory."""
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = Field("float32", json_schema_extra=AUTO)
    """Data type of forward and backward passes; master weights stay float32. `tf32`: float32 with
    TF32 products on a GPU; `auto`: bfloat16 on a GPU that has it, else float32."""
    kernels: Literal["compiled", "eager", "deterministic"] = "compiled"
    """On a GPU: `compiled` uses torch.compile for the layers, `eager` does not, `deterministic`
    makes replays on the same GPU model bit-identical."""
    device: str = Field("cpu", json_schema_extra=AUTO)
    """`cpu`, `cuda` (CUDA_VISIBLE_DEVICES selects GPUs), or `auto`: `cuda` where torch can use a
    GPU, on other machines where `cluster` states or requests GPUs, but `cpu` for a tiny model."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(3, ge=1)
    """Number of recent checkpoints to keep, besides that of step 0."""

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of step 1, 2, ...: of settings alone, so that a replay repeats it."""
        return scheduled_rate(
            self.learning_rate,
            step=step,
            schedule=self.learning_rate_schedule,
            num_warmup_steps=self.num_warmup_steps,
            num_decay_steps=self.num_decay_steps,
        )


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a trainer rank reads of a recipe."""

    trainer: TrainerSettings
    algorithm: ComposedAlgorithm
    num_ranks: int
    temperature: float
    """At which completions are sampled."""
    served_dtype: str
    """Of the weights that generators load."""
    serves_adapter: bool
    """Whether they load the policy's adapter alone."""
    pass_threshold: float
    """A completion passes if its reward is above this."""
    seed: int
    recipe_digest: str
    """Of the whole recipe, for checkpoints."""
    takes_turns: bool
    """Whether a generator has the GPU while this rank waits."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs beside the policy and the sequences."""

    algorithm: ComposedAlgorithm
    temperature: float
    seed: int
    loss: TokenLoss | None = None
    """Custom loss; None: the algorithm's own."""
    packs_groups: bool = False
    """Keep the sequences of a group in one micro-batch, for a loss of pairs."""

    @property
    def token_loss(self) -> TokenLoss:
        return self.loss or self.algorithm.loss

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads proximal log-probabilities; assume that a custom one does."""
        return self.loss is not None or self.algorithm.needs_proximal
