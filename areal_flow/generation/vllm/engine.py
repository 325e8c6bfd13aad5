"""vLLM's engine, driven as any `EngineCore`: one `LLMEngine.step` a decode step.

It decides which completions vLLM runs (so that `drain` can hold the others back), and what new
weights do to them; the rest is vLLM's. A prompt's prefix is shared only by completions that start
on one policy version: the version salts vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from areal_flow.errors import EngineError
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.generation.scheduler import require_room
from areal_flow.generation.threaded_engine import ThreadedEngine
from areal_flow.generation.vllm.core import (
    CoreProcess,
    InProcessCore,
    VLLMCore,
    engine_config,
    find_stop_strings,
)
from areal_flow.generation.vllm.support import is_seeded, require_vllm_serves
from areal_flow.generation.vllm.weights import ServedTensors, check_logprobs
from areal_flow.types import Completion, GroupRequest, Sampling, VersionSpan
from areal_flow.weights.card_transfer import CardTransfer
from areal_flow.weights.channel import WeightsReader

# isort: split
# Only now: `core` has set what vLLM reads when it is imported.
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

SLEEP_LEVEL = 1
"""vLLM keeps the weights in main memory: at 2 they are gone, also where no new ones come, as after
a trainer that was lost."""


@dataclass(slots=True)
class _Group:
    """A request, and the completions that it has so far, by the index of their seed."""

    request: GroupRequest
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _Member:
    """One completion that vLLM runs, and the policy version that it started on."""

    request_id: str
    index: int
    version: int
    num_reported: int = 0
    """Tokens that `GroupRequest.on_token` has had."""


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
        self._groups: dict[str, _Group] = {}
        self._waiting: deque[tuple[str, int]] = deque()
        """Request and seed of each completion that has not started."""
        self._running: dict[str, _Member] = {}
        """By vLLM's name of the request."""
        self._pending: tuple[Mapping[str, Tensor] | CardTransfer, int] | None = (tensors, version)
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

    def occupancy(self) -> dict[str, float]:
        return {"batch_size": len(self._running), "queue_length": len(self._waiting)}

    def step(self) -> list[tuple[str, list[Completion]]]:
        if self._pending and not self._running:
            self._switch_weights()
        if not self._pending:
            self._admit()
        if not self._running:
            return []
        complete = []
        for output in self._llm.step():
            member = self._running[output.request_id]
            group = self._groups[member.request_id]
            if on_token := group.request.on_token:
                for token in output.outputs[0].token_ids[member.num_reported :]:
                    on_token(member.index, token)
                member.num_reported = len(output.outputs[0].token_ids)
            if not output.finished:
                continue
            del self._running[output.request_id]
            group.completions[member.index] = self._completion(output.outputs[0], member)
            if len(group.completions) == len(group.request.seeds):
                del self._groups[member.request_id]
                in_order = [group.completions[index] for index in range(len(group.completions))]
                complete.append((member.request_id, in_order))
        return complete

    def load_weights(self, tensors: Mapping[str, Tensor] | CardTransfer, *, version: int) -> None:
        self._pending = (tensors, version)
        if self.settings.interruption != "drain":
            self._switch_weights()

    def suspend(self) -> None:
        """Leave the card: weights go to main memory, keys and values are computed again later."""
        self._core.call("sleep", SLEEP_LEVEL, "keep")  # running requests stay

    def resume(self) -> None:
        self._core.call("wake_up", None)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.settings.max_num_seqs:
            request_id, index = self._waiting.popleft()
            request = self._groups[request_id].request
            name = f"{request_id}/{index}"
            prompt = {
                "prompt_token_ids": request.prompt_tokens.tolist(),
                "cache_salt": str(self.version),
            }
            self._running[name] = _Member(request_id, index, self.version)
            seed = request.seeds[index] if is_seeded(self.settings) else None
            parameters = _parameters(request.sampling, seed)
            if request.on_token:
                parameters.output_kind = RequestOutputKind.CUMULATIVE
            self._llm.add_request(name, prompt, parameters)

    def _switch_weights(self) -> None:
        """Load between two steps; what raises here must end this engine, see `ThreadedEngine`."""
        assert self._pending is not None
        weights, version = self._pending
        call, clear_cache = self._core.call, self.settings.interruption != "keep"
        with self._update_info(weights) as update_info:
            # Running requests stay; without the cache they prefill again.
            call("pause_scheduler", "keep", clear_cache)
            self._call_workers("start_weight_update")
            self._call_workers("update_weights", update_info)
            self._call_workers("finish_weight_update")
            call("set_weight_version", str(version))
            call("resume_scheduler")
        self.version, self._pending = version, None

    @contextmanager
    def _update_info(self, weights: Mapping[str, Tensor] | CardTransfer) -> Iterator[Any]:
        """Yield what `TransferEngine` receives."""
        if isinstance(weights, CardTransfer):
            init_info = {"message": weights.message("init"), "rank": weights.rank}
            self._call_workers("init_weight_transfer_engine", init_info)
            yield {"message": weights.message("update"), "tied": self._served.tied}
            weights.finish()
        else:
            with self._core.offered(self._served.checkpoint(weights)) as tensors:
                yield {"tensors": tensors, "tied": self._served.tied}

    def _call_workers(self, method: str, *arguments: Any) -> None:
        self._core.call("collective_rpc", method, None, arguments)

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


def _parameters(sampling: Sampling, seed: int | None) -> SamplingParams:
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
        ignore_eos=True,  # the stop tokens are all there are
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def start_vllm_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> ThreadedEngine:
    make_core = CoreProcess if settings.device == "cuda" else InProcessCore
    return await start_engine(model, settings, reader, make_core)


async def start_engine(
    model: Path,
    settings: GenerationSettings,
    reader: WeightsReader,
    make_core: Callable[[VllmConfig], VLLMCore],
) -> ThreadedEngine:
    require_vllm_serves(model, settings)
    core = await asyncio.to_thread(_make_core, model, settings, make_core)
    try:
        engine = await asyncio.to_thread(_load_weights, core, model, settings, reader)
    except BaseException:
        core.close()
        raise
    return ThreadedEngine(engine, end=core.close, suspend=engine.suspend, resume=engine.resume)


def _make_core(
    model: Path, settings: GenerationSettings, make_core: Callable[[VllmConfig], VLLMCore]
) -> VLLMCore:
    gc.collect()  # a broken predecessor's memory
    core = make_core(engine_config(model, settings))
    if settings.stop.strings:
        find_stop_strings(core.llm, model)
    return core


def _load_weights(
    core: VLLMCore, model: Path, settings: GenerationSettings, reader: WeightsReader
) -> VLLMEngine:
    version = reader.newest()
    tensors = reader.load(version)
    engine = VLLMEngine(core, ServedTensors(model), settings, tensors, version=version)
    check_logprobs(engine, model, tensors, settings)
    return engine
