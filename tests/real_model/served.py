"""Real prompts for engines with new weights on the way, and transformers as the reference.

An engine may round as much as transformers' own forward does in the same type: both are compared
with a forward of more digits. By quantiles: with top-p, a rounding decides which tokens are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.policy import DTYPES, load_policy, policy_tensors
from areal_flow.policy.tokenizer.directory import chat_template_of, tokenizer_of
from areal_flow.rollout.engines.protocol import EngineCore, GenerationSettings
from benchmarks.harness import take_turns
from tests.engines import logprobs_of, run_all, versions_of
from tests.real_model.rows import SAMPLE

NUM_PROMPTS, NUM_TOKENS = 64, 24
SWITCH_AFTER = 36
"""Steps: half of the completions are over by then, most others have begun."""
SAMPLINGS = (Sampling(NUM_TOKENS), Sampling(NUM_TOKENS, temperature=0.8, top_p=0.9))
MORE_DIGITS = {"bfloat16": torch.float32, "float32": torch.float64}
QUANTILES = (0.5, 0.9, 0.99)

Weights = Mapping[str, torch.Tensor]


class Served(NamedTuple):
    request: GroupRequest
    completion: Completion


def settings_for(dtype: str, **changed: Any) -> GenerationSettings:
    sizes = {"max_model_len": 384, "max_new_tokens": NUM_TOKENS, "max_num_seqs": 32}
    return GenerationSettings.model_validate({"dtype": dtype, **sizes, **changed})


def real_requests(model: Path) -> list[GroupRequest]:
    """Return GSM8K's questions as the template has them, with either sampling in turns."""
    tokenizer, chat = tokenizer_of(model), chat_template_of(model)
    assert chat is not None
    texts = [chat.render([{"role": "user", "content": row["question"]}]) for row in SAMPLE]
    return [
        GroupRequest(str(at), as_tokens(tokenizer.encode(text).ids), (at,), SAMPLINGS[at % 2])
        for at, text in enumerate(texts[:NUM_PROMPTS])
    ]


def versions_for(model: Path, dtype: str) -> list[Weights]:
    """Return the model's weights, and others: each tensor moved by a twentieth of its deviation."""
    first = policy_tensors(load_policy(model, dtype=dtype))
    drawn = torch.Generator().manual_seed(0)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=drawn) * tensor.float().std() / 20
        return (tensor.float() + noise).to(tensor.dtype)

    return [first, {name: moved(tensor) for name, tensor in first.items()}]


def serve(engine: EngineCore, requests: Sequence[GroupRequest], later: Weights) -> list[Served]:
    """Complete the requests, the last ones with weights that come between their tokens."""
    for request in requests:
        engine.add(request)
    completions: dict[str, list[Completion]] = {}
    for _ in range(SWITCH_AFTER):
        completions.update(engine.step())
    engine.load_weights(later, version=1)
    while engine.has_work():
        completions.update(engine.step())
    served = [Served(request, *completions[request.request_id]) for request in requests]
    kinds = [tuple(sorted({*versions_of(each.completion)})) for each in served]
    assert min(kinds.count((0,)), kinds.count((0, 1))) >= NUM_PROMPTS // 4, "the switch is too late"
    return served


@torch.no_grad()
def logprobs_by(
    model: Path, versions: Sequence[Weights], dtype: torch.dtype, served: Sequence[Served]
) -> list[np.ndarray]:
    """Return by transformers' forward what each token was drawn with, under its own version."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    filled = [np.full(len(each.completion.tokens), np.nan) for each in served]
    for version, weights in enumerate(versions):
        _, unexpected = policy.load_state_dict(weights, strict=False)
        assert not unexpected
        for (request, completion), logprobs in zip(served, filled, strict=True):
            of_version = np.array(versions_of(completion)) == version
            if of_version.any():
                tokens = completion.tokens.tolist()
                ids = torch.tensor([[*request.prompt_tokens.tolist(), *tokens]])
                logits = policy(ids, logits_to_keep=len(tokens) + 1, use_cache=False).logits[0, :-1]
                own = logprobs_of(logits, request.prompt_tokens, tokens, request.sampling)
                logprobs[of_version] = np.array(own)[of_version]
    return filled


def check_rounding(
    model: Path, versions: Sequence[Weights], dtype: str, served: Sequence[Served], times: float
) -> dict[str, float]:
    """Return the 99% quantiles of gaps, in nats, of an engine and of transformers.

    Args:
        times: how much more the engine may round. Weights of the wrong version make 9 times as
            much in bfloat16, and 100,000 times in float32.
    """
    exact = logprobs_by(model, versions, MORE_DIGITS[dtype], served)
    plain = logprobs_by(model, versions, DTYPES[dtype], served)
    engine = gaps([each.completion.logprobs for each in served], exact)
    transformers = gaps(plain, exact)
    for sampling in range(len(SAMPLINGS)):
        at = np.repeat(np.arange(NUM_PROMPTS) % 2 == sampling, [len(each) for each in exact])
        actual, bound = quantiles(engine[at]), times * quantiles(transformers[at])
        assert (actual <= bound).all(), (actual, bound)
    return {"engine": quantiles(engine)[-1], "transformers": quantiles(transformers)[-1]}


def quantiles(gaps: np.ndarray) -> np.ndarray:
    return np.quantile(gaps, QUANTILES, method="lower")


def tokens_per_s(model: Path, **engines: EngineCore) -> dict[str, float]:
    """Return what each engine samples a second for groups of four, prompts among it.

    The best of three times, in turns: other programs only take away.
    """
    requests = [
        replace(request, seeds=(0, 1, 2, 3), sampling=Sampling(32))
        for request in real_requests(model)[:8]
    ]

    def measure(engine: EngineCore) -> float:
        began = perf_counter()
        completions = run_all(engine, *requests)
        num_tokens = sum(len(each.tokens) for group in completions.values() for each in group)
        return num_tokens / (perf_counter() - began)

    measured = take_turns(3, {name: partial(measure, engine) for name, engine in engines.items()})
    return {name: max(speeds) for name, speeds in measured.items()}


def gaps(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """Return how far apart numbers are; two that top-p leaves no mass are equal."""
    left, right = np.concatenate(actual), np.concatenate(expected)
    with np.errstate(invalid="ignore"):
        return np.where(left == right, 0, np.abs(left - right))
