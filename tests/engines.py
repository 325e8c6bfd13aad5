"""Engines under test, each with its exact log-probabilities, and requests for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from areal_flow.generation.protocol import EngineCore, GenerationSettings, Interruption
from areal_flow.generation.sampling import processed_logprobs
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.attention import PackedLayout
from areal_flow.models.policy import policy_tensors
from areal_flow.testing import BigramEngine
from areal_flow.types import Completion, GroupRequest, Sampling, as_tokens
from tests.policies import small_policy

VOCABULARY = 13
VLLM_LENGTH = 64
"""The longest sequence of vLLM's engine under test, in tokens."""


@dataclass(frozen=True)
class Subject:
    """An engine under test, weights for it, and its exact log-probabilities."""

    make: Callable[..., EngineCore]
    weights: Callable[[int], Mapping[str, Any]]
    reference: Callable[[int, Sequence[int], Sequence[int], Sampling], list[float]]
    """(version, prompt, tokens, sampling) -> log-probability of each token."""


def torch_subject() -> Subject:
    def make(*, max_num_seqs: int = 8, version: int = 0, **settings: Any) -> EngineCore:
        policy = small_policy(seed=version, vocab_size=VOCABULARY)
        settings = {"max_model_len": 64, "max_new_tokens": 1, **settings}
        return TorchEngine(
            policy, GenerationSettings(max_num_seqs=max_num_seqs, **settings), version=version
        )

    return subject_of_policies(make)


def subject_of_policies(make: Callable[..., EngineCore], *, tied: bool = False) -> Subject:
    """Return a subject with the small policies' weights, and their own forward as reference."""
    policies = {
        version: small_policy(seed=version, vocab_size=VOCABULARY, tied=tied)
        for version in range(4)
    }

    @torch.no_grad()
    def reference(
        version: int, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *tokens]])
        layout = PackedLayout([ids.shape[1]])
        logits = policies[version](
            input_ids=ids, position_ids=layout.position_ids, use_cache=False, layout=layout
        ).logits[0, len(prompt) - 1 : -1]
        logprobs = processed_logprobs(logits, sampling)
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return Subject(make, lambda version: policy_tensors(policies[version]), reference)


def vllm_subject(*, in_process: bool = True, tied: bool = False) -> Subject:
    """All engines that it makes share one core of vLLM, which takes seconds to start."""
    from areal_flow.generation import vllm_engine

    core, served = shared_core(in_process=in_process, tied=tied)

    def make(
        *, max_num_seqs: int = 8, version: int = 0, interruption: Interruption = "interrupt"
    ) -> EngineCore:
        left = list(core.llm.output_processor.request_states)
        core.llm.abort_request(left, internal=True)
        settings = GenerationSettings(
            max_num_seqs=max_num_seqs,
            max_model_len=VLLM_LENGTH,
            max_new_tokens=1,
            interruption=interruption,
        )
        weights = subject.weights(version)
        return vllm_engine.VLLMEngine(core, served, settings, weights, version=version)

    subject = subject_of_policies(make, tied=tied)
    return subject


@cache
def shared_core(*, in_process: bool, tied: bool) -> tuple[Any, Any]:
    """Return vLLM's core with the small policy, and what it is served with."""
    from areal_flow.generation.vllm_core import CoreProcess, InProcessCore, engine_config
    from areal_flow.generation.vllm_weights import ServedTensors

    settings = GenerationSettings(max_num_seqs=512, max_model_len=VLLM_LENGTH, max_new_tokens=1)
    with TemporaryDirectory() as directory:
        config = small_policy(vocab_size=VOCABULARY, tied=tied).config
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(directory)
        model = Path(directory)
        make_core = InProcessCore if in_process else CoreProcess
        return make_core(engine_config(model, settings)), ServedTensors(model)


def bigram_subject() -> Subject:
    tables = {
        version: (torch.randn(VOCABULARY, VOCABULARY, generator=_seeded(version)) * 1.5).tolist()
        for version in range(4)
    }

    def make(
        *, max_num_seqs: int = 8, version: int = 0, interruption: Interruption = "interrupt"
    ) -> EngineCore:
        if interruption != "interrupt":
            pytest.skip("the bigram engine keeps nothing that could be old")
        return BigramEngine(tables[version], version=version, max_num_seqs=max_num_seqs)

    def reference(
        version: int, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
    ) -> list[float]:
        if sampling.top_k or sampling.top_p < 1:
            pytest.skip("the bigram engine samples the whole distribution")
        logprobs = torch.tensor(tables[version], dtype=torch.float64).div(sampling.temperature)
        logprobs = logprobs.log_softmax(1)
        before = [prompt[-1], *tokens[:-1]]
        return [float(logprobs[b, t]) for b, t in zip(before, tokens, strict=True)]

    return Subject(make, lambda version: {"logits": tables[version]}, reference)


SUBJECTS: dict[str, Callable[[], Subject]] = {"torch": torch_subject, "bigram": bigram_subject}
if find_spec("vllm"):  # in the environment of `nox -s tests_vllm` alone
    SUBJECTS["vllm"] = vllm_subject
    SUBJECTS["vllm-core-process"] = partial(vllm_subject, in_process=False)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def request_of(
    name: str = "r", *, seeds: int = 4, length: int = 20, **sampling: Any
) -> GroupRequest:
    prompt = as_tokens([1 + (ord(name[-1]) + i) % (VOCABULARY - 1) for i in range(5)])
    return GroupRequest(
        name, prompt, tuple(range(100, 100 + seeds)), Sampling(max_new_tokens=length, **sampling)
    )


def run_all(engine: EngineCore, *requests: GroupRequest) -> dict[str, list[Completion]]:
    for request in requests:
        engine.add(request)
    found: dict[str, list[Completion]] = {}
    while engine.has_work():
        found.update(engine.step())
    return found


def versions_of(completion: Completion) -> list[int]:
    return [version for version, length in completion.version_spans for _ in range(length)]
