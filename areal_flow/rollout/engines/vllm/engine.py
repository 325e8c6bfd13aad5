"""vLLM as an `EngineCore`: one `LLMEngine.step` per decode step.

Completions that vLLM runs are chosen here, so that `drain` can hold the others back, and so is what
new weights do to them. Completions share a prompt's prefix only if they start with the same policy
version, which salts vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Completion, GroupRequest, Sampling
from areal_flow.policy.models.lora import adapter_rank, merge_scaled, split_adapter
from areal_flow.policy.weights.channel import WeightsReader
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.scheduler import SampledSequence, SlotScheduler, require_room
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine
from areal_flow.rollout.engines.vllm.core import (
    POLICY_ADAPTER,
    CoreProcess,
    InProcessCore,
    VLLMCore,
    engine_config,
    find_stop_strings,
    offered_adapter,
)
from areal_flow.rollout.engines.vllm.support import require_vllm_serves
from areal_flow.rollout.engines.vllm.weights import ServedTensors, check_logprobs

# isort: split
# After `core`, which sets environment variables that vLLM reads when it is imported.
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

SLEEP_LEVEL = 1
"""vLLM keeps the weights in main memory. At level 2 they would be lost if no new ones came, as
after the loss of a trainer."""


class VLLMEngine:
    def __init__(
        self,
        core: VLLMCore,
        served: ServedTensors,
        settings: GenerationSettings,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
    ) -> None:
        self.settings = settings
        self._core, self._llm = core, core.llm
        self._served = served
        self._scheduler = SlotScheduler(settings.max_num_seqs, finds_stop_strings=False)
        self._adapter: LoRARequest | None = None
        self._pending: tuple[Mapping[str, Tensor], int] | None = (tensors, version)
        self._switch_weights()

    def add(self, request: GroupRequest) -> None:
        require_room(request, self.settings.max_model_len)
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        running = self._scheduler.running.items()
        slots = [str(slot) for slot, each in running if each.request.request_id == request_id]
        self._scheduler.cancel(request_id)
        self._llm.abort_request(slots)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pending is not None

    def occupancy(self) -> dict[str, float]:
        return self._scheduler.occupancy()

    def step(self) -> list[tuple[str, list[Completion]]]:
        running = self._scheduler.running
        if self._pending and not running:
            self._switch_weights()
        if not self._pending:
            self._scheduler.admit(self._start)
        if not running:
            return []
        for output in self._llm.step():
            member, completion = running[int(output.request_id)], output.outputs[0]
            for token in completion.token_ids[len(member.tokens) :]:
                if member.request.on_token:
                    member.request.on_token(member.index, token)
                member.tokens.append(token)
            if output.finished:
                self._end(completion, member)
        return self._scheduler.finish()

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._pending = (tensors, version)
        if self.settings.interruption != "drain":
            self._switch_weights()

    def suspend(self) -> None:
        """Free the GPU: weights go to main memory, keys and values are computed again later."""
        self._core.call("sleep", SLEEP_LEVEL, "keep")  # running requests stay

    def resume(self) -> None:
        self._core.call("wake_up", None)

    def _start(self, slot: int, member: SampledSequence) -> bool:
        request = member.request
        prompt = {
            "prompt_token_ids": request.prompt_tokens.tolist(),
            "cache_salt": str(self.version),
        }
        member.spans = [[self.version, 0]]
        parameters = _parameters(request.sampling, request.seeds[member.index])
        if request.on_token:
            parameters.output_kind = RequestOutputKind.CUMULATIVE
        # vLLM makes the id unique.
        self._llm.add_request(str(slot), prompt, parameters, lora_request=self._adapter)
        return True

    def _switch_weights(self) -> None:
        """Load between two steps; an error here must end this engine, see `ThreadedEngine`."""
        assert self._pending is not None
        weights, version = self._pending
        call, clear_cache = self._core.call, self.settings.interruption != "keep"
        base, adapter = split_adapter(weights)
        with ExitStack() as stack:
            tensors = None
            if not (adapter and self._adapter):  # else the base is there
                offered = self._core.offered(self._served.checkpoint(base), weights)
                tensors = stack.enter_context(offered)
            if adapter:
                request = stack.enter_context(offered_adapter(adapter))
            began = perf_counter()
            # Running requests stay; without the cache they prefill again.
            call("pause_scheduler", "keep", clear_cache)
            ready = perf_counter()
            if tensors is not None:
                update = {"tensors": tensors, "tied": self._served.tied}
                self._call_workers("start_weight_update")
                self._call_workers("update_weights", update)
                self._call_workers("finish_weight_update")
            if adapter:
                call("add_lora", request)
                self._require_used(adapter)
            loaded = perf_counter()
            call("set_weight_version", str(version))
            call("resume_scheduler")
            ended = perf_counter()
        logger.info(
            "version %d paused vLLM for %.3f s: %.3f s to stop, %.3f s to load, %.3f s to resume",
            version,
            ended - began,
            ready - began,
            loaded - ready,
            ended - loaded,
        )
        self.version, self._pending = version, None

    def _require_used(self, adapter: Mapping[str, Tensor]) -> None:
        """Note that requests have an adapter; refuse the first if vLLM ignores a part of it."""
        if self._adapter:
            return
        if unused := sorted({*chain(*self._call_workers("unused_adapter_modules"))}):
            raise ModelError(
                "generation.vllm.engine_args.enable_lora: vLLM has no matrices for "
                f"{len(unused)} of the adapter's: {', '.join(unused[:4])}: leave the argument out, "
                "and engines get merged weights"
            )
        self._adapter = POLICY_ADAPTER

    def _call_workers(self, method: str, *arguments: Any) -> Any:
        return self._core.call("collective_rpc", method, None, arguments)

    def _end(self, output: CompletionOutput, member: SampledSequence) -> None:
        is_certain = member.distribution.temperature == 0  # vLLM's would be those of temperature 1
        logprobs = [0.0] * len(member.tokens) if is_certain else output.logprobs.logprobs
        member.logprobs = array("f", logprobs)
        if self.settings.interruption == "keep":
            member.spans[0][1] = len(member.tokens)
        else:
            spans = output.weight_versions
            member.spans = [[int(span.version), span.end - span.start] for span in spans]
        member.finish_reason = output.finish_reason


def _parameters(sampling: Sampling, seed: int) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=min(sampling.min_new_tokens, sampling.max_new_tokens),
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # `stop_token_ids` has all of them
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def start_vllm_engine(
    model: Path,
    settings: GenerationSettings,
    reader: WeightsReader,
    *,
    make_core: Callable[[VllmConfig], VLLMCore] | None = None,
) -> ThreadedEngine:
    require_vllm_serves(model, settings)
    make_core = make_core or (CoreProcess if settings.device == "cuda" else InProcessCore)
    core = await asyncio.to_thread(_make_core, model, settings, reader, make_core)
    try:
        engine = await asyncio.to_thread(_load_weights, core, model, settings, reader)
    except BaseException:
        core.close()
        raise
    return ThreadedEngine(engine, end=core.close, suspend=engine.suspend, resume=engine.resume)


def _make_core(
    model: Path,
    settings: GenerationSettings,
    reader: WeightsReader,
    make_core: Callable[[VllmConfig], VLLMCore],
) -> VLLMCore:
    gc.collect()  # frees the memory of a broken predecessor
    lora_rank = 0
    if settings.vllm.serves_adapter:
        lora_rank = adapter_rank(reader.load(reader.newest()))
    core = make_core(engine_config(model, settings, lora_rank=lora_rank))
    if settings.stop.strings:
        find_stop_strings(core.llm, model)
    return core


def _load_weights(
    core: VLLMCore, model: Path, settings: GenerationSettings, reader: WeightsReader
) -> VLLMEngine:
    began, version = perf_counter(), reader.newest()
    tensors = reader.load(version)
    engine = VLLMEngine(core, ServedTensors(model), settings, tensors, version=version)
    loaded = perf_counter()
    check_logprobs(engine, model, merge_scaled(tensors), settings)
    checked = perf_counter()
    logger.info(
        "vLLM serves version %d: weights took %.1f s, the check of log-probabilities %.1f s",
        version,
        loaded - began,
        checked - loaded,
    )
    return engine
