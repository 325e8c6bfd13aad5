"""The contract of every engine, checked by `tests/contracts/test_engines.py`, and its settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from areal_flow.core.settings import AUTO, Settings, require
from areal_flow.core.types import Completion, EngineStats, GroupRequest
from areal_flow.policy.weights.channel import WeightsReader

Interruption = Literal["interrupt", "keep", "drain"]
"""What happens to running completions when new weights arrive.

- `interrupt`: their keys and values are computed again with the new weights, and they continue.
- `keep`: they continue with their old keys and values. Each later token counts as sampled by the
  oldest version in its cache, so that the bound on staleness holds for everything that it was
  computed from. Its log-probability is that of the mixture that it was drawn from.
- `drain`: they finish with the old weights first.
"""


WHOLE_DISTRIBUTION: dict[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Fields of `Sampling` that change probabilities, which the trainer does not know, and the values
at which they do not. Only evaluations have these settings."""


class StopSettings(Settings):
    """What ends a completion besides the model's end-of-sequence tokens; it is kept and trained.

    Both hold in training and in evaluations.
    """

    strings: tuple[str, ...] = Field((), strict=False)
    """Stop strings; they may span tokens."""
    token_ids: tuple[int, ...] = Field((), strict=False)
    """Stop token ids."""

    @model_validator(mode="after")
    def _can_end(self) -> StopSettings:
        require("" not in self.strings, "generation.stop.strings must have no empty string")
        require(
            min(self.token_ids, default=0) >= 0,
            f"generation.stop.token_ids ({[*self.token_ids]}) must be tokens of the model, from 0",
        )
        return self


OWN_ENGINE_ARGS = {
    "model": "model",
    "dtype": "generation.dtype",
    "max_model_len": "generation.max_model_len",
    "max_num_seqs": "generation.max_num_seqs",
    "kv_cache_memory_bytes": "generation.kv_cache_tokens",
    "max_lora_rank": "trainer.lora.rank",
    **{
        name: f"generation.vllm.{name}"
        for name in (
            *("tensor_parallel_size", "gpu_memory_utilization", "quantization"),
            *("enable_sleep_mode", "enforce_eager"),
        )
    },
    **dict.fromkeys(
        (
            *("load_format", "skip_tokenizer_init", "generation_config", "hf_overrides"),
            *("block_size", "enable_prefix_caching", "logprobs_mode", "async_scheduling"),
            *("disable_log_stats", "max_loras", "weight_transfer_config", "worker_extension_cls"),
        )
    ),
}
"""Arguments of vLLM's `EngineArgs` that a run sets, and the setting of each that has one."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for; an adapter of another takes that of the next."""

WEIGHTLESS_SPECULATION = ("ngram", "ngram_gpu", "suffix")
"""Methods of vLLM's speculative decoding that propose tokens without a model."""


class VLLMSettings(Settings):
    """Settings of vLLM only."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs per generator (tensor parallelism)."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of GPU memory for weights and cache, if `kv_cache_tokens` is 0. If a trainer uses the
    same GPU, the default is 0.4 (0.6 if they take turns), the size of the cache is computed from it
    instead of measured, and the trainer is limited to the rest, whatever `kv_cache_tokens` is."""
    quantization: Literal["fp8"] | None = None
    """Quantize the generators' weights to 8 bits; the trainer's stay as they are."""
    enable_sleep_mode: bool = False
    """Let the engine release its GPU memory for the trainer; always on where both take turns on one
    GPU (`schedule = "sync"`)."""
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: faster start, slower decoding. Always on for CPUs."""
    engine_args: dict[str, Any] = Field({})
    """Further arguments of vLLM's `EngineArgs` by name, such as `speculative_config`, as vLLM's own
    documentation describes them. Those that a run sets itself are refused. With `enable_lora` a
    new version is the policy's adapter alone, not merged weights."""

    @model_validator(mode="after")
    def _leaves_our_arguments(self) -> VLLMSettings:
        for name in OWN_ENGINE_ARGS.keys() & self.engine_args.keys():
            setting = OWN_ENGINE_ARGS[name]
            instead = f"use the setting {setting}" if setting else "leave it out"
            require(False, f"generation.vllm.engine_args: a run sets {name} itself: {instead}")
        return self

    @property
    def serves_adapter(self) -> bool:
        """Whether vLLM gets the policy's adapter alone, and not merged weights."""
        return bool(self.engine_args.get("enable_lora"))

    @model_validator(mode="after")
    def _serves_plain_adapters(self) -> VLLMSettings:
        require(
            not (self.serves_adapter and self.quantization),
            "generation.vllm.engine_args.enable_lora: no adapter was ever served with "
            f"quantization = {self.quantization!r}: leave either out",
        )
        return self

    @property
    def speculation(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config`, if it has any."""
        return self.engine_args.get("speculative_config")

    @model_validator(mode="after")
    def _speculates_exactly(self) -> VLLMSettings:
        if self.speculation is None:
            return self
        name = "generation.vllm.engine_args.speculative_config"
        method = self.speculation.get("method")
        require(
            method in WEIGHTLESS_SPECULATION,
            f"{name}.method: expected one of {', '.join(WEIGHTLESS_SPECULATION)}, found "
            f"{method!r}: engines start with random weights, and a model that proposes tokens "
            "would keep them",
        )
        require(
            self.speculation.get("rejection_sample_method") != "synthetic",
            f"{name}.rejection_sample_method = 'synthetic' accepts tokens whatever their "
            "probability is: leave it out",
        )
        return self


class GenerationSettings(Settings):
    """The inference engine and the sampling of completions."""

    engine: str = "auto"
    """`vllm`, `torch` (CPU and reference), or `auto`: vLLM on a GPU if it is installed, else torch.
    A resumed run keeps its engine."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    max_new_tokens: int = Field(64, ge=1)
    """Maximum length of a completion, in tokens."""
    stop: StopSettings = StopSettings()
    """What ends a completion besides the model's end-of-sequence tokens."""
    max_model_len: int = Field(0, ge=0)
    """Maximum length of prompt and completion together, in tokens; 0: the model's maximum, limited
    by `trainer.tokens_per_micro_batch` and memory."""
    max_num_seqs: int = Field(128, ge=1)
    """Maximum number of sequences that one generator decodes at once."""
    kv_cache_tokens: int = Field(0, ge=0)
    """Capacity of a generator's KV cache, in tokens; 0: enough for all its sequences, or as much as
    fits into memory. When it is full, the newest sequence waits and is prefilled again."""
    batch_invariant: bool = False
    """Make completions depend on their seed only, not on what else is in the batch; slower."""
    interruption: Interruption = "interrupt"
    """On new weights: `interrupt` recomputes the cache and continues, `keep` continues with the old
    cache, `drain` finishes running completions first."""
    dtype: Literal["auto", "float32", "bfloat16"] = Field("float32", json_schema_extra=AUTO)
    """Data type of the engine and its weights; `auto`: bfloat16 on a GPU that has it, else
    float32."""
    device: str = Field("cpu", json_schema_extra=AUTO)
    """`cpu`, `cuda` or `auto` for the engine, as `trainer.device`."""
    vllm: VLLMSettings = VLLMSettings()
    """Settings of vLLM only."""

    @model_validator(mode="before")
    @classmethod
    def _without_truncation(cls, given: Any) -> Any:
        """Refuse settings of evaluations; recipes of earlier runs may have them at no effect."""
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            require(
                name not in WHOLE_DISTRIBUTION or value == WHOLE_DISTRIBUTION[name],
                f"generation.{name} ({value}): training samples from the full distribution. "
                "Behaviour log-probabilities would be those of another one than the trainer's, "
                "and importance weights would be biased (a mean of 0.9 instead of 1 at top_p 0.9): "
                f"set evaluation.{name}, which is for held-out answers",
            )
        return {name: value for name, value in given.items() if name not in WHOLE_DISTRIBUTION}

    @model_validator(mode="after")
    def _fits(self) -> GenerationSettings:
        require(
            not self.max_model_len or self.max_new_tokens < self.max_model_len,
            f"generation.max_new_tokens ({self.max_new_tokens}) must leave room for a prompt in "
            f"max_model_len ({self.max_model_len})",
        )
        require(
            not self.kv_cache_tokens or self.kv_cache_tokens >= self.max_model_len,
            f"generation.kv_cache_tokens ({self.kv_cache_tokens}) must be 0 or at least "
            f"max_model_len ({self.max_model_len}): one sequence must fit",
        )
        for name, value in self.vllm.model_dump(exclude_defaults=True).items():
            setting = f"generation.vllm.{name} ({value})"
            require(
                self.engine != "torch",
                f"{setting} is of vLLM alone; set generation.engine to 'vllm', or leave it out",
            )
            require(
                self.device == "cuda" or name in ("enforce_eager", "engine_args"),
                f"{setting} needs generation.device = 'cuda', found {self.device!r}",
            )
        return self

    def num_pages(self, page_tokens: int, *, room: float) -> int:
        """Return the number of pages of an engine whose memory has `room` for that many."""
        # One sequence must fit, whose prompt may end in a page of its own.
        longest = -(-self.max_model_len // page_tokens) + 1
        if self.kv_cache_tokens:
            return max(longest, -(-self.kv_cache_tokens // page_tokens))
        return max(longest, int(min(longest * self.max_num_seqs, room)))


class EngineCore(Protocol):
    """An engine driven one decode step at a time, by one thread; see `ThreadedEngine`."""

    version: int
    """The policy version that samples the next token."""

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            EngineError: the request can never fit, or one of its id is running.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a group at once; unknown ids are ignored."""

    def has_work(self) -> bool:
        """Return whether `step` would do anything."""

    def occupancy(self) -> dict[str, float]:
        """Return gauges for monitoring; called by another thread."""

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Sample one token for every running completion; return the groups that are complete."""

    def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        """Serve these weights from the next token on, by the engine's interruption rule."""


class Engine(Protocol):
    """An engine as rollouts use it. Its worker owns it, and closes it before it is replaced."""

    @property
    def version(self) -> int:
        """The policy version that samples new tokens."""

    @property
    def broken(self) -> bool:
        """Whether it failed, and must be closed and replaced."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """Return one completion per seed, in the order of seeds; cancelling this frees the slots.

        Raises:
            EngineError: the request can never fit, or the engine is broken or closed.
        """

    async def load_weights(self, version: int, reader: WeightsReader) -> None:
        """Load `version`, and return once it samples every new token.

        Raises:
            WeightsError: the reader does not have this version; the engine continues as before.
            EngineError: the engine broke during the switch, or was closed.
        """

    async def sleep(self) -> None:
        """Release the device's memory after the current decode step.

        Requests stay, and continue after `wake`. Until then no weights may be loaded.

        Raises:
            EngineError: the engine broke, or was closed.
        """

    async def wake(self) -> None:
        """Take the memory again, with the same weights."""

    def stats(self) -> EngineStats:
        """Return totals since the engine started, also after it was closed."""

    def occupancy(self) -> dict[str, float]:
        """Return gauges: `batch_size`, `queue_length`, and `cache_fraction` if it is known.

        `draining` is 1 while loaded weights wait for running completions.
        """

    def close(self) -> None:
        """Free all resources; waiting requests get an `EngineError`. Idempotent."""


EngineFactory = Callable[[Path, GenerationSettings, WeightsReader], Awaitable[Engine]]
"""Starts an engine on this worker, which serves the newest version of the reader; the registry has
one per name. The directory has the model's configuration; weights come from the reader."""
