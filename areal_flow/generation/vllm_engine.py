"""vLLM's engine in this process, driven as any `EngineCore`: one `LLMEngine.step` a decode step.

It adapts, and decides little: which completions vLLM runs (so that `drain` can hold the others
back), and what new weights do to them. Kernels, paged memory, shared prefixes and sampling are
vLLM's. A prompt's prefix is shared only by completions that start on one policy version: the
version salts vLLM's prefix cache.

Whoever imports this module gets a process for generation alone: vLLM seeds torch's global
generator and makes `torch.set_num_threads` do nothing. `start_vllm_engine` is what the registry
names.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from areal_flow.errors import EngineError
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.generation.scheduler import require_room
from areal_flow.generation.threaded_engine import ThreadedEngine
from areal_flow.generation.vllm_support import require_vllm_serves
from areal_flow.generation.vllm_weights import ServedTensors, WeightsExtension, check_logprobs
from areal_flow.types import Completion, GroupRequest, Sampling, VersionSpan
from areal_flow.weights.channel import WeightsReader

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, without a child
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share cores
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""vLLM reads these when it is imported, and has no other setting for them."""

os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault(
    "VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir()) / f"areal-flow-vllm-{os.getuid()}")
)
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.outputs import CompletionOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

BLOCK_TOKENS = 32
"""Tokens of one page of keys and values; on CPU, vLLM needs a multiple of 32."""


@dataclass(slots=True)
class _Group:
    """A request, and the completions that it has so far, by the index of their seed."""

    request: GroupRequest
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Member:
    """One completion that vLLM runs, and the policy version that it started on."""

    request_id: str
    index: int
    version: int


class VLLMEngine:
    """An `EngineCore` over an `LLMEngine` of this process, whose weights it loads first."""

    def __init__(
        self,
        llm: LLMEngine,
        served: ServedTensors,
        settings: GenerationSettings,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
    ) -> None:
        self.settings = settings
        self._llm = llm
        self._served = served
        self._groups: dict[str, _Group] = {}
        self._waiting: deque[tuple[str, int]] = deque()
        """Request and seed of each completion that has not started."""
        self._running: dict[str, _Member] = {}
        """By vLLM's name of the request."""
        self._pending: tuple[Mapping[str, Tensor], int] | None = (tensors, version)
        self._switch_weights()

    def add(self, request: GroupRequest) -> None:
        if not len(request.prompt_tokens):
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is running already")
        require_room(request, self.settings.max_model_len)
        self._groups[request.request_id] = _Group(request)
        self._waiting.extend((request.request_id, index) for index in range(len(request.seeds)))

    def cancel(self, request_id: str) -> None:
        self._groups.pop(request_id, None)
        self._waiting = deque(each for each in self._waiting if each[0] != request_id)
        names = [name for name, each in self._running.items() if each.request_id == request_id]
        for name in names:
            del self._running[name]
        self._llm.abort_request(names)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._pending)

    def step(self) -> list[tuple[str, list[Completion]]]:
        if self._pending and not self._running:
            self._switch_weights()
        if not self._pending:
            self._admit()
        complete = []
        for output in self._llm.step():
            member = self._running.pop(output.request_id)
            group = self._groups[member.request_id]
            group.completions[member.index] = self._completion(output.outputs[0], member)
            if len(group.completions) == len(group.request.seeds):
                del self._groups[member.request_id]
                in_order = [group.completions[index] for index in range(len(group.completions))]
                complete.append((member.request_id, in_order))
        return complete

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._pending = (tensors, version)
        if self.settings.interruption != "drain":
            self._switch_weights()

    def _admit(self) -> None:
        """Start completions that wait, in order, as far as `max_num_seqs` allows."""
        while self._waiting and len(self._running) < self.settings.max_num_seqs:
            request_id, index = self._waiting.popleft()
            request = self._groups[request_id].request
            name = f"{request_id}/{index}"
            prompt = {
                "prompt_token_ids": request.prompt_tokens.tolist(),
                "cache_salt": str(self.version),
            }
            self._running[name] = _Member(request_id, index, self.version)
            self._llm.add_request(name, prompt, _parameters(request.sampling, request.seeds[index]))

    def _switch_weights(self) -> None:
        """Load between two steps; what raises here must end this engine, see `ThreadedEngine`."""
        assert self._pending is not None
        tensors, version = self._pending
        checkpoint = self._served.checkpoint(tensors)
        self._llm.collective_rpc("serve_tensors", args=(checkpoint, self._served.tied))
        # Only with its running requests the cache is sure to be dropped; they prefill again.
        self._llm.reset_prefix_cache(
            reset_running_requests=self.settings.interruption == "interrupt"
        )
        self._llm.engine_core.set_weight_version(str(version))
        self.version, self._pending = version, None

    def _completion(self, output: CompletionOutput, member: _Member) -> Completion:
        sampling = self._groups[member.request_id].request.sampling
        tokens = np.array(output.token_ids, np.int32)
        logprobs = np.array(output.logprobs.logprobs, np.float32)
        if sampling.temperature == 0:  # vLLM's are those of temperature 1
            logprobs = np.zeros_like(logprobs)
        spans: tuple[VersionSpan, ...]
        if self.settings.interruption == "keep":
            spans = (VersionSpan(member.version, len(tokens)),)
        else:
            spans = tuple(
                VersionSpan(int(span.version), span.end - span.start)
                for span in output.weight_versions
            )
        return Completion(tokens, logprobs, spans, output.finish_reason)


def _parameters(sampling: Sampling, seed: int) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the stop tokens are all there are
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def make_llm(model: Path, settings: GenerationSettings) -> LLMEngine:
    """Make vLLM's engine of a model directory, with random weights."""
    on_cpu = settings.device == "cpu"
    if on_cpu:  # or the first step would need a C++ compiler, and half a minute
        torch._dynamo.config.disable = True
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.vllm.tensor_parallel_size,
        gpu_memory_utilization=settings.vllm.gpu_memory_utilization,
        quantization=settings.vllm.quantization,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,  # a step's tokens are those of the weights before it
        enforce_eager=on_cpu or settings.vllm.enforce_eager,
        disable_log_stats=True,
        worker_extension_cls=f"{WeightsExtension.__module__}.{WeightsExtension.__name__}",
    ).create_engine_config()
    if on_cpu or settings.kv_cache_tokens:  # vLLM would take nearly all memory of the machine
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, settings)
    return LLMEngine.from_vllm_config(config, disable_log_stats=True)


def _cache_bytes(config: Any, settings: GenerationSettings) -> int:
    """Return the memory of as many tokens as a generator keeps."""
    model, parallel = config.model_config, config.parallel_config
    num_heads = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    token_bytes: int = 2 * num_heads * model.get_head_size() * model.dtype.itemsize
    num_blocks = settings.num_pages(BLOCK_TOKENS) + 1  # vLLM keeps the first for itself
    return num_blocks * BLOCK_TOKENS * token_bytes


async def start_vllm_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> ThreadedEngine:
    """Start an engine in this process; see `EngineFactory`."""
    return ThreadedEngine(await asyncio.to_thread(_load_core, model, settings, reader))


def _load_core(model: Path, settings: GenerationSettings, reader: WeightsReader) -> VLLMEngine:
    require_vllm_serves(model, settings)
    gc.collect()  # a broken predecessor's memory
    # Engines of a process share these modules. One that broke in an update left them half loaded,
    # and log-probabilities of the next one differed by 0.005.
    rotary_embedding._ROPE_DICT.clear()
    version = reader.newest()
    tensors = reader.load(version)
    llm, served = make_llm(model, settings), ServedTensors(model)
    core = VLLMEngine(llm, served, settings, tensors, version=version)
    check_logprobs(core, model, tensors, settings)
    return core
