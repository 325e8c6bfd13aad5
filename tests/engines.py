"""Engines under test, each with its exact log-probabilities, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.settings import LoraSettings
from areal_flow.rollout.engines.protocol import (
    EngineCore,
    GenerationSettings,
    Interruption,
    VLLMSettings,
)
from areal_flow.rollout.engines.sampling import adjust_logits, processed_logprobs
from areal_flow.rollout.engines.torch_engine import TorchEngine
from tests.fakes import BigramEngine
from tests.policies import add_random_adapter, small_policy, weights_with_scaled_adapter

VOCABULARY = 13
LETTERS = "abcdefghijklm"
MAX_MODEL_LEN = 64
"""The longest sequence of an engine under test, in tokens."""

SPECULATION = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
"""Arguments of vLLM with which tokens are proposed after an earlier occurrence of the last one."""


@dataclass(frozen=True)
class Subject:
    """An engine under test, weights for it, and its exact log-probabilities."""

    make: Callable[..., EngineCore]
    weights: Callable[[int], Mapping[str, Any]]
    reference: Callable[[int, Sequence[int], Sequence[int], Sampling], list[float]]
    """(version, prompt, tokens, sampling) -> log-probability of each token."""
    max_model_len: int | None = MAX_MODEL_LEN
    has_min_p: bool = True


def torch_subject() -> Subject:
    def make(*, max_num_seqs: int = 8, version: int = 0, **settings: Any) -> EngineCore:
        policy = small_policy(seed=version, vocab_size=VOCABULARY)
        settings = {"max_model_len": MAX_MODEL_LEN, "max_new_tokens": 1, **settings}
        chosen = GenerationSettings(max_num_seqs=max_num_seqs, **settings)
        return TorchEngine(policy, chosen, version=version, tokenizer=letters())

    return subject_of_policies(make)


def subject_of_policies(
    make: Callable[..., EngineCore], *, tied: bool = False, lora_rank: int = 0
) -> Subject:
    """Return a subject with the small policies' weights, and their own forward as reference.

    With a rank, versions are one policy with different adapters.
    """
    policies = {
        version: small_policy(seed=version * (not lora_rank), vocab_size=VOCABULARY, tied=tied)
        for version in range(4)
    }
    weights = {version: policy_tensors(policy) for version, policy in policies.items()}
    if lora_rank:
        for version, policy in policies.items():
            add_random_adapter(policy, LoraSettings(rank=lora_rank), seed=version)
            weights[version] = weights_with_scaled_adapter(policy)

    @torch.no_grad()
    def reference(
        version: int, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *tokens]])
        layout = PackedLayout([ids.shape[1]])
        logits = policies[version](
            input_ids=ids, position_ids=layout.position_ids, use_cache=False, layout=layout
        ).logits[0, len(prompt) - 1 : -1]
        return logprobs_of(logits, prompt, tokens, sampling)

    return Subject(make, weights.__getitem__, reference)


def logprobs_of(
    logits_TV: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> list[float]:
    """Return the exact log-probability of each token of a completion."""
    prompts = [as_tokens(prompt)] * len(tokens)
    own = [as_tokens(tokens[:at]) for at in range(len(tokens))]
    logprobs_TV = processed_logprobs(adjust_logits(logits_TV, sampling, prompts, own), sampling)
    logprobs: list[float] = logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return logprobs


def letters() -> Tokenizer:
    """Return a tokenizer of the engines under test: token 0 is `a`, and so on."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=LETTERS[0]))
    tokenizer.decoder = Fuse()
    return tokenizer


def vllm_subject(*, tied: bool = False, **chosen: Any) -> Subject:
    """All engines share one vLLM core, since starting one takes seconds."""
    from areal_flow.rollout.engines.vllm import engine as vllm_engine

    core, served = shared_core(tied=tied, **chosen)
    engines = engines_of(core)

    def make(
        *, max_num_seqs: int = 8, version: int = 0, interruption: Interruption = "interrupt"
    ) -> EngineCore:
        for engine in engines:
            core.llm.engine_core.abort_requests(list(engine._sampled))
        settings = GenerationSettings(
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            max_new_tokens=1,
            interruption=interruption,
        )
        weights = subject.weights(version)
        engines[:] = [
            vllm_engine.VLLMEngine(
                core, served, settings, weights, version=version, tokenizer=letters()
            )
        ]
        return engines[0]

    lora_rank = chosen.get("lora_rank", 0)
    subject = subject_of_policies(make, tied=tied, lora_rank=lora_rank)
    return replace(subject, has_min_p=not chosen.get("speculates"))


@cache
def shared_core(
    *,
    in_process: bool = True,
    tied: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    speculates: bool = False,
    lora_rank: int = 0,
) -> tuple[Any, Any]:
    """Return a vLLM core serving the small policy, and its settings."""
    from areal_flow.rollout.engines.vllm.core import CoreProcess, InProcessCore, engine_config
    from areal_flow.rollout.engines.vllm.weights import ServedTensors

    settings = GenerationSettings(
        dtype=dtype,
        max_num_seqs=512,
        max_model_len=MAX_MODEL_LEN,
        max_new_tokens=1,
        vllm=VLLMSettings(engine_args=SPECULATION if speculates else {}),
    )
    with TemporaryDirectory() as directory:
        config = small_policy(vocab_size=VOCABULARY, tied=tied).config
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(directory)
        model = Path(directory)
        vllm_config = engine_config(model, settings, lora_rank=lora_rank)
        vllm_config.scheduler_config.async_scheduling = not in_process  # as on a GPU
        core = (InProcessCore if in_process else CoreProcess)(vllm_config)
        return core, ServedTensors(model)


@cache
def engines_of(core: Any) -> list[Any]:
    """Return a list that has the last engine which was made with a core."""
    return []


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
        return BigramEngine(
            tables[version], version=version, max_num_seqs=max_num_seqs, tokenizer=letters()
        )

    def reference(
        version: int, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
    ) -> list[float]:
        logits = torch.tensor(tables[version])[[prompt[-1], *tokens[:-1]]]
        return logprobs_of(logits, prompt, tokens, sampling)

    return Subject(make, lambda version: {"logits": tables[version]}, reference, max_model_len=None)


SUBJECTS: dict[str, Callable[[], Subject]] = {"torch": torch_subject, "bigram": bigram_subject}
if find_spec("vllm"):  # in the environment of `nox -s tests_vllm` alone
    SUBJECTS["vllm"] = vllm_subject
    SUBJECTS["vllm-core-process"] = partial(vllm_subject, in_process=False)
    SUBJECTS["vllm-speculating"] = partial(vllm_subject, speculates=True)
    SUBJECTS["vllm-adapters"] = partial(vllm_subject, lora_rank=3)
    SUBJECTS["vllm-adapters-core-process"] = partial(vllm_subject, lora_rank=3, in_process=False)


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
    completions: dict[str, list[Completion]] = {}
    while engine.has_work():
        completions.update(engine.step())
    return completions


def versions_of(completion: Completion) -> list[int]:
    return [version for version, length in completion.version_spans for _ in range(length)]


def request_with_prompt(
    name: str, num_tokens: int, *, seeds: int, length: int, draw: str = ""
) -> GroupRequest:
    """Return a request with a random prompt: that of `draw`, or its name's own."""
    rng = random.Random(draw or name)
    prompt = as_tokens([rng.randrange(VOCABULARY) for _ in range(num_tokens)])
    return GroupRequest(name, prompt, tuple(range(seeds)), Sampling(max_new_tokens=length))


def assert_exact(
    subject: Subject, request: GroupRequest, completions: Sequence[Completion]
) -> None:
    """Compare with full forwards of the version that drew each token."""
    for completion in completions:
        versions = versions_of(completion)
        by_version = {
            v: subject.reference(v, request.prompt_tokens, completion.tokens, request.sampling)
            for v in {*versions}
        }
        expected = [by_version[version][at] for at, version in enumerate(versions)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def run_crowd(
    engine: EngineCore,
    subject: Subject,
    rng: random.Random,
    *,
    longest_prompt: int,
    longest: int,
) -> None:
    """Run 200 requests that join, leave and are cancelled at random, under four versions.

    Each that is not cancelled is complete, and some of them are compared with full forwards.
    """
    requests = [
        request_with_prompt(
            f"{i}",
            rng.randint(1, longest_prompt),
            seeds=rng.randint(1, 4),
            length=rng.randint(1, longest),
        )
        for i in range(200)
    ]
    waiting, running = requests[::-1], set[str]()
    completions_by_name: dict[str, list[Completion]] = {}
    cancelled, version = set[str](), 0
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.3:
            running.add(waiting[-1].request_id)
            engine.add(waiting.pop())
        if running and rng.random() < 0.03:
            cancelled.add(gone := rng.choice(sorted(running)))
            running.discard(gone)
            engine.cancel(gone)
        if version < 3 and rng.random() < 0.02:
            version += 1
            engine.load_weights(subject.weights(version), version=version)
        for name, completions in engine.step():
            completions_by_name[name] = completions
            running.discard(name)
    assert completions_by_name.keys() | cancelled == {request.request_id for request in requests}
    assert cancelled
    assert version == engine.version == 3
    for request in rng.sample([r for r in requests if r.request_id in completions_by_name], 20):
        completions = completions_by_name[request.request_id]
        assert [len(c.tokens) for c in completions] == [request.sampling.max_new_tokens] * len(
            request.seeds
        )
        assert_exact(subject, request, completions)
