"""vLLM's turn in `benchmarks/generation.py`, which runs this in the interpreter that has vLLM.

Decodes the load twice, since the first time prepares, and prints the seconds of the second time.

    PYTHON -m benchmarks.generation_vllm MODEL_DIRECTORY MODEL GROUPS MAX_NUM_SEQS

Without arguments, prints what one process spends on each token that vLLM's core process sends to
it: plain vLLM's `LLMEngine`, as `LLM.generate` runs it, and the project's engine. No model runs;
256 requests get a random token with its log-probability in each of 256 steps.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np

from areal_flow.core.types import GroupRequest, Sampling
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine
from areal_flow.rollout.engines.vllm import engine as vllm_engine
from areal_flow.rollout.engines.vllm.core import (
    InProcessCore,
    engine_config,
    skip_unused_arrays,
)
from areal_flow.rollout.engines.vllm.weights import ServedTensors
from benchmarks.harness import seconds_of
from benchmarks.shapes import random_policy
from benchmarks.tailed_load import (
    GROUP_SIZE,
    MODELS,
    MODERATE,
    PROMPT_TOKENS,
    Load,
    random_load,
    run_all,
    settings_for,
)

# isort: split
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

NUM_SEQS = NUM_STEPS = 256


def end_at_given_lengths(load: Load) -> None:
    """End each completion at its own length: a member's seed is its place in the load."""
    lengths, parameters = load.lengths.ravel().tolist(), vllm_engine._parameters

    def of_member(sampling: Sampling, seed: int) -> Any:
        return parameters(replace(sampling, max_new_tokens=lengths[seed]), seed)

    vllm_engine._parameters = of_member


def main(directory: str, name: str, num_groups: str, max_num_seqs: str) -> None:
    model = Path(directory)
    load = random_load(int(num_groups), MODERATE, MODELS[name].vocab_size)
    settings = settings_for(load, int(max_num_seqs))
    tensors = policy_tensors(load_policy(model))
    core, served = InProcessCore(engine_config(model, settings)), ServedTensors(model)
    end_at_given_lengths(load)
    engine = vllm_engine.VLLMEngine(core, served, settings, tensors, version=0)
    run_all(engine, load)
    print(seconds_of(lambda: run_all(engine, load)))


class RecordedCore:
    """Has all messages of a core process as bytes, which a thread decodes, as vLLM's does."""

    def __init__(self) -> None:
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self._ids: list[str] = []
        self._outputs: queue.Queue[EngineCoreOutputs] = queue.Queue()
        self.recording_s = 0.0

    def add_request(self, request: Any) -> None:
        self._ids.append(request.request_id)
        if len(self._ids) == NUM_SEQS:
            began = process_time()
            messages = [self._message(step) for step in range(NUM_STEPS)]
            self.recording_s = process_time() - began
            threading.Thread(target=self._decode, args=(messages,), daemon=True).start()

    def get_output(self) -> EngineCoreOutputs:
        return self._outputs.get()

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def dp_engines_running(self) -> bool:
        return False

    def _message(self, step: int) -> Any:
        rng = np.random.default_rng(step)
        tokens_S1 = rng.integers(1, 1000, (NUM_SEQS, 1))
        logprobs_S1 = np.log(rng.random((NUM_SEQS, 1), np.float32))
        logprobs = LogprobsLists(tokens_S1, logprobs_S1, tokens_S1[:, 0])
        ends = FinishReason.LENGTH if step == NUM_STEPS - 1 else None
        outputs = [
            EngineCoreOutput(
                name, tokens_S1[seq].tolist(), logprobs.slice_request(seq, 1), finish_reason=ends
            )
            for seq, name in enumerate(self._ids)
        ]
        return MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, weight_version="0"))

    def _decode(self, messages: list[Any]) -> None:
        for message in messages:
            self._outputs.put(self.decoder.decode(message))


def run_plain(llm: Any) -> None:
    parameters = SamplingParams(
        n=GROUP_SIZE,
        max_tokens=NUM_STEPS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for group in range(NUM_SEQS // GROUP_SIZE):
        prompt = {"prompt_token_ids": [1 + group] * PROMPT_TOKENS}
        llm.add_request(str(group), prompt, parameters)
    num_tokens = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            num_tokens += sum(len(each.token_ids) for each in output.outputs)
    assert num_tokens == NUM_SEQS * NUM_STEPS


async def run_engine(core: vllm_engine.VLLMEngine) -> None:
    engine = ThreadedEngine(core)
    requests = [
        GroupRequest(
            str(group),
            np.full(PROMPT_TOKENS, 1 + group),
            tuple(range(GROUP_SIZE)),
            Sampling(NUM_STEPS),
        )
        for group in range(NUM_SEQS // GROUP_SIZE)
    ]
    groups = await asyncio.gather(*map(engine.generate, requests))
    engine.close()
    num_tokens = sum(len(each.tokens) for group in groups for each in group)
    assert num_tokens == NUM_SEQS * NUM_STEPS


def front_end() -> None:
    """Print CPU microseconds per token of all threads, without those of the recording."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    settings = GenerationSettings(
        engine="vllm", max_num_seqs=NUM_SEQS, max_model_len=PROMPT_TOKENS + NUM_STEPS
    )
    with TemporaryDirectory() as scratch:
        model = Path(scratch)
        policy = random_policy(1024, 128, 2, heads=2, key_value_heads=2)
        policy.config.save_pretrained(model)
        core, served = InProcessCore(engine_config(model, settings)), ServedTensors(model)
        tensors = policy_tensors(policy)
        engine = vllm_engine.VLLMEngine(core, served, settings, tensors, version=0)
    llm = core.llm
    llm.get_supported_tasks()  # of the core that is there, once
    switch_interval_s = sys.getswitchinterval()

    def plain(recorded: RecordedCore) -> None:
        sys.setswitchinterval(switch_interval_s)  # `ThreadedEngine` changes it
        run_plain(llm)

    def ours(recorded: RecordedCore) -> None:
        skip_unused_arrays(recorded.decoder)
        asyncio.run(run_engine(engine))

    def cost_us(run: Callable[[RecordedCore], None]) -> float:
        llm.engine_core = recorded = RecordedCore()
        gc.collect()
        began = process_time()
        run(recorded)
        seconds = process_time() - began - recorded.recording_s
        return 1e6 * seconds / (NUM_SEQS * NUM_STEPS)

    rows = [(cost_us(plain), cost_us(ours)) for _ in range(6)][1:]
    of_plain, of_ours = map(median, zip(*rows, strict=True))
    print(f"microseconds per token: LLMEngine {of_plain:.1f}, areal-flow {of_ours:.1f}")
    ratios = sorted(ours / plain for plain, ours in rows)
    print(f"areal-flow / LLMEngine: {median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else front_end()
