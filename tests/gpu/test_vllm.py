"""vLLM on a GPU: with its graphs and asynchronous scheduling, the CPU's promises hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.policy.settings import LoraSettings
from areal_flow.rollout.engines.protocol import Engine, GenerationSettings, VLLMSettings
from areal_flow.rollout.engines.registry import engine_factory
from areal_flow.training.head import LinearHead, linear_logprobs
from tests.fakes import MemoryReader, MemoryWriter
from tests.policies import add_random_adapter, weights_with_scaled_adapter, write_model_directory
from tests.vllm.models import Operators, logits_of_vllm, published

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM"),
]

PROMPT = [5, 6, 7]
REQUEST = GroupRequest("r", as_tokens(PROMPT), tuple(range(8)), Sampling(400))


@pytest.fixture(params=[False, True], ids=["as it is", "batch invariant"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    settings = GenerationSettings(
        engine="vllm", device="cuda", dtype="bfloat16", max_num_seqs=8, max_model_len=512,
        max_new_tokens=400, batch_invariant=request.param,
    )  # fmt: skip
    writer = published(write_model_directory(tmp_path / "0"))
    reader = MemoryReader(writer)
    started = await engine_factory("vllm")(tmp_path / "0", settings, reader)
    writer.stage(1, policy_tensors(load_policy(write_model_directory(tmp_path / "1", seed=1))))
    writer.publish(1)
    started.reader = reader  # type: ignore[attr-defined]
    yield started
    started.close()


def difference(completion: Completion, policies: list[Any]) -> float:
    """Return the mean distance of its log-probabilities from those of each token's version."""
    ids_T = torch.tensor([*PROMPT, *completion.tokens.tolist()])
    by_version = []
    for policy in policies:
        with torch.no_grad():
            logits_TV = policy(input_ids=ids_T[None]).logits[0, len(PROMPT) - 1 : -1]
        logprobs_TV = logits_TV.float().log_softmax(-1)
        by_version.append(logprobs_TV.gather(1, ids_T[len(PROMPT) :, None])[:, 0].numpy())
    versions = [v for v, length in completion.version_spans for _ in range(length)]
    expected = np.stack(by_version)[versions, np.arange(len(versions))]
    return float(np.abs(expected - completion.logprobs).mean())


async def test_tokens_have_the_log_probabilities_of_their_versions_across_new_weights(
    engine: Any, tmp_path: Path
) -> None:
    running = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.sleep(0.2)
    await engine.load_weights(1, engine.reader)
    completions = await running
    assert {v for c in completions for v, _ in c.version_spans} == {0, 1}
    policies = [load_policy(tmp_path / str(version)) for version in (0, 1)]
    for policy in policies:
        policy.set_attn_implementation("eager")
    assert np.mean([difference(c, policies) for c in completions]) < 0.1


async def test_adapter_is_replaced_while_requests_run(tmp_path: Path) -> None:
    model, writer, policies = write_model_directory(tmp_path / "model"), MemoryWriter(), []
    for version in (0, 1):
        policies.append(load_policy(model))
        add_random_adapter(policies[-1], LoraSettings(rank=4), seed=version)
        writer.stage(version, weights_with_scaled_adapter(policies[-1]))
    writer.publish(0)
    settings = GenerationSettings(
        engine="vllm", device="cuda", dtype="bfloat16", max_num_seqs=8, max_model_len=512,
        max_new_tokens=400, vllm=VLLMSettings(engine_args={"enable_lora": True}),
    )  # fmt: skip
    reader = MemoryReader(writer)
    engine = await engine_factory("vllm")(model, settings, reader)
    try:
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.2)
        writer.publish(1)
        await engine.load_weights(1, reader)
        completions = await running
    finally:
        engine.close()
    assert {v for c in completions for v, _ in c.version_spans} == {0, 1}
    for policy in policies:
        policy.set_attn_implementation("eager")
    assert np.mean([difference(c, policies) for c in completions]) < 0.1


async def test_seeds_reproduce_completions(engine: Any) -> None:
    """Every token with batch-invariant kernels; otherwise until rounding changes a choice."""
    first, second = [await engine.generate(REQUEST) for _ in range(2)]
    num_compared = None if engine._core.settings.batch_invariant else 20
    drawn = [[tuple(c.tokens[:num_compared].tolist()) for c in each] for each in (first, second)]
    num_equal = sum(a == b for a, b in zip(*drawn, strict=True))
    assert num_equal >= (len(first) if num_compared is None else len(first) - 2)
    assert len({*drawn[0]}) == len(first), "members of a group differ"


def test_float32_head_has_the_trainer_s_log_probabilities() -> None:
    """By one product of bfloat16 with a sum in float32, as the trainer's own."""
    hidden_TH, weight_VH = (
        torch.randn(num, 1536, device="cuda").div_(8).bfloat16() for num in (200, 5000)
    )
    targets_T = torch.randint(5000, (200,), device="cuda")
    with Operators() as operators:
        logits_TV = logits_of_vllm(hidden_TH, weight_VH)
    assert logits_TV.dtype == torch.float32
    assert operators.names.count("aten.mm.dtype") == 1
    assert not any("copy" in name for name in operators.names)
    served_T = logits_TV.log_softmax(1).gather(1, targets_T[:, None])[:, 0]
    head = LinearHead(
        weight_VH, None, lambda each: each, 1.0, needs_entropy=False, entropy_has_gradient=False
    )
    trained_T, _ = linear_logprobs(hidden_TH, targets_T, head)
    torch.testing.assert_close(served_T, trained_T, atol=1e-5, rtol=1e-5)
    exact_TV = hidden_TH.double() @ weight_VH.double().T
    torch.testing.assert_close(logits_TV.double(), exact_TV, atol=1e-5, rtol=1e-5)
