"""vLLM as an `EngineCore`: one step of vLLM's core per decode step.

Completions that vLLM runs are chosen here, so that `drain` can hold the others back, and so is what
new weights do to them. Completions share a prompt's prefix only if they start with the same policy
version, which salts vLLM's prefix cache. What the core samples is appended to completions here,
which takes a fraction of the time that vLLM's own `OutputProcessor` takes per token.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Completion, GroupRequest, Sampling
from areal_flow.policy.models.lora import adapter_rank, merge_scaled, split_adapter
from areal_flow.policy.tokenizer.directory import tokenizer_of
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
    offered_adapter,
    submit,
)
from areal_flow.rollout.engines.vllm.support import require_vllm_serves
from areal_flow.rollout.engines.vllm.weights import ServedTensors, check_logprobs

# isort: split
# After `core`, which sets environment variables that vLLM reads when it is imported.
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.settings = settings
        self._core, self._llm = core, core.llm
        self._served = served
        self._scheduler = SlotScheduler(settings.max_num_seqs, tokenizer)
        self._sampled: dict[str, SampledSequence] = {}
        """Completions that vLLM's core samples, by its ids."""
        self._adapter: LoRARequest | None = None
        self._pending: tuple[Mapping[str, Tensor], int] | None = (tensors, version)
        self._switch_weights()

    def add(self, request: GroupRequest) -> None:
        require_room(request, self.settings.max_model_len)
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        members = self._sampled.items()
        ids = [i for i, member in members if member.request.request_id == request_id]
        for each in ids:
            del self._sampled[each]
        self._scheduler.cancel(request_id)
        self._llm.engine_core.abort_requests(ids)

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
        outputs, stopped = self._llm.engine_core.get_output(), []
        for output in outputs.outputs:
            member = self._sampled.get(output.request_id)
            if member is None:
                continue  # it was aborted, and the core was a step ahead
            self._append(output, member, outputs.weight_version)
            if member.finish_reason:
                del self._sampled[output.request_id]
                if output.finish_reason is None:  # at a stop string: vLLM does not look for them
                    stopped.append(output.request_id)
        self._llm.engine_core.abort_requests(stopped)
        return self._scheduler.finish()

    def _append(self, output: EngineCoreOutput, member: SampledSequence, version: str) -> None:
        if output.new_token_ids:
            # vLLM's log-probabilities of the likeliest token are those of temperature 1.
            is_certain = member.distribution.temperature == 0
            kept = self.settings.interruption == "keep"
            sampled_by = member.spans[0][0] if kept else int(version)
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            for token, logprob in zip(output.new_token_ids, logprobs, strict=True):
                member.append(token, 0.0 if is_certain else logprob, sampled_by)
                if member.finish_reason:
                    break  # the rest of what was proposed
        if output.finish_reason is not None and member.finish_reason is None:
            reason: Any = str(output.finish_reason)
            member.finish_reason = reason

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
        if self.settings.interruption == "keep":
            member.spans = [[self.version, 0]]
        parameters = _parameters(request.sampling, request.seeds[member.index])
        request_id = submit(self._llm, str(slot), prompt, parameters, adapter=self._adapter)
        self._sampled[request_id] = member
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
        detokenize=False,
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
    return make_core(engine_config(model, settings, lora_rank=lora_rank))


def _load_weights(
    core: VLLMCore, model: Path, settings: GenerationSettings, reader: WeightsReader
) -> VLLMEngine:
    began, version = perf_counter(), reader.newest()
    tensors = reader.load(version)
    tokenizer = tokenizer_of(model)  # a call may have stop strings of its own
    engine = VLLMEngine(
        core, ServedTensors(model), settings, tensors, version=version, tokenizer=tokenizer
    )
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
