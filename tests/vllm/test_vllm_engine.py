"""Behaviour specific to vLLM's engine: stale caches, tied weights, failing updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from areal_flow.core.errors import ConfigError, EngineError, ModelError, WeightsError
from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.lora import split_adapter
from areal_flow.rollout.engines.registry import engine_factory
from areal_flow.rollout.engines.vllm.core import TransferEngine
from areal_flow.rollout.engines.vllm.support import CPU_HEAD_SIZES, installed_vllm
from areal_flow.rollout.engines.vllm.weights import check_logprobs
from areal_flow.training.head import LinearHead, linear_logprobs
from tests.engines import (
    LETTERS,
    VOCABULARY,
    Subject,
    request_of,
    run_all,
    versions_of,
    vllm_subject,
)
from tests.fakes import MemoryReader, MemoryWriter
from tests.policies import small_policy, write_model_directory
from tests.vllm.models import SETTINGS, published

LONG_PROMPT = as_tokens([1 + i % (VOCABULARY - 1) for i in range(40)])
"""Longer than a page of keys and values, so that it can be found in the prefix cache."""


def long_request(name: str) -> GroupRequest:
    return GroupRequest(name, LONG_PROMPT, (1, 2, 3, 4), Sampling(20))


def assert_of_versions(subject: Subject, completion: Completion, prompt: Any) -> None:
    """Each token has the log-probability that the policy of its version gives it."""
    versions = versions_of(completion)
    by_version = {
        version: subject.reference(version, prompt, completion.tokens, Sampling(1))
        for version in set(versions)
    }
    expected = [by_version[version][at] for at, version in enumerate(versions)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    return vllm_subject(in_process=getattr(request, "param", True))


with_each_core = pytest.mark.parametrize(
    "subject", [True, False], ids=["in process", "core process"], indirect=True
)


@with_each_core
def test_kept_prefix_is_read_by_the_completions_that_it_was_kept_for_alone(
    subject: Subject,
) -> None:
    engine = subject.make(interruption="keep")
    engine.add(long_request("kept"))
    completions: dict[str, list[Completion]] = {}
    for _ in range(6):
        completions.update(engine.step())
    engine.load_weights(subject.weights(1), version=1)
    engine.add(long_request("after"))
    while engine.has_work():
        completions.update(engine.step())
    assert {v for completion in completions["kept"] for v in versions_of(completion)} == {0}
    for completion in completions["kept"]:
        for version in (0, 1):
            pure = subject.reference(version, LONG_PROMPT, completion.tokens, Sampling(1))
            assert np.abs(completion.logprobs[7:] - pure[7:]).max() > 1e-3
    for completion in completions["after"]:
        assert set(versions_of(completion)) == {1}
        assert_of_versions(subject, completion, LONG_PROMPT)


@with_each_core
def test_requests_go_on_after_a_sleep_with_new_weights(subject: Subject) -> None:
    """Of the CPU's vLLM, which keeps its memory: what is asked of it, and in which order."""
    engine: Any = subject.make()
    engine.add(long_request("slept"))
    completions: dict[str, list[Completion]] = {}
    for _ in range(6):
        completions.update(engine.step())
    engine.suspend()
    assert engine._core.call("is_sleeping")
    engine.resume()
    assert not engine._core.call("is_sleeping")
    engine.load_weights(subject.weights(1), version=1)
    while engine.has_work():
        completions.update(engine.step())
    for completion in completions["slept"]:
        assert set(versions_of(completion)) == {0, 1}
        assert_of_versions(subject, completion, LONG_PROMPT)


def test_cancelled_requests_give_their_pages_back(subject: Subject) -> None:
    engine = subject.make(max_num_seqs=64)
    pool = engine._core.llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
    run_all(engine, long_request("first"))
    free = pool.get_num_free_blocks()
    for i in range(20):
        engine.add(long_request(f"r{i}"))
        engine.step()
        assert pool.get_num_free_blocks() < free
        engine.cancel(f"r{i}")
        engine.step()
    assert pool.get_num_free_blocks() == free
    assert not engine.has_work()


def test_core_stops_sampling_what_a_stop_string_ended(subject: Subject) -> None:
    engine: Any = subject.make()
    request = GroupRequest("r", as_tokens([5, 6]), (1, 2), Sampling(40, stop_strings=(*LETTERS,)))
    for completion in run_all(engine, request)["r"]:
        assert (len(completion.tokens), completion.finish_reason) == (1, "stop")
    assert not engine._core.llm.engine_core.engine_core.scheduler.has_unfinished_requests()


def test_requests_carry_their_seed_on_each_device() -> None:
    subject = vllm_subject()
    drawn = []
    for device in ("cpu", "cuda", "cuda"):
        engine = subject.make()
        engine.settings = engine.settings.model_copy(update={"device": device})  # type: ignore[attr-defined]
        drawn.append([c.tokens.tolist() for c in run_all(engine, request_of())["r"]])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({*map(tuple, drawn[0])}) == len(drawn[0]), "members of a group differ"


def without_head(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def test_missing_tensors_are_refused_before_any_is_loaded(subject: Subject) -> None:
    engine = subject.make()
    before = run_all(engine, request_of())["r"]
    with pytest.raises(WeightsError, match=r"not in both: lm_head\.weight"):
        engine.load_weights(without_head(subject.weights(1)), version=1)
    after = run_all(subject.make(), request_of())["r"]
    assert [c.tokens.tolist() for c in after] == [c.tokens.tolist() for c in before]


def test_model_that_is_computed_otherwise_is_refused(subject: Subject, tmp_path: Path) -> None:
    """As vLLM computes experts on the CPU: with weights that it says it has replaced."""
    engine = subject.make(version=0)
    small_policy(vocab_size=VOCABULARY).config.save_pretrained(tmp_path)
    check_logprobs(engine, tmp_path, subject.weights(0), SETTINGS)
    with pytest.raises(ModelError, match=r"differ by \S+ in the mean.*to 'torch'"):
        check_logprobs(engine, tmp_path, subject.weights(1), SETTINGS)


def test_vllm_warns_of_layers_without_new_weights_alone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of sines of positions, which no checkpoint has: they stay as they are."""
    engine: Any = subject.make()
    warned: list[str] = []
    monkeypatch.setattr(layerwise.logger, "warning", lambda _, layer: warned.append(layer))
    worker = engine._core.llm.engine_core.engine_core.model_executor.driver_worker
    model = worker.model_runner.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("cos_sin_cache" in name for name in before)
    engine.load_weights(subject.weights(1), version=1)
    assert warned == []
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    receive = TransferEngine.receive_weights

    def without_norm(engine: TransferEngine, update: Any) -> None:
        update.tensors = {n: t for n, t in update.tensors.items() if n != "model.norm.weight"}
        receive(engine, update)

    monkeypatch.setattr(TransferEngine, "receive_weights", without_norm)
    engine.load_weights(subject.weights(2), version=2)
    assert warned == ["RMSNorm"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


def torn(engine: TransferEngine, update: Any) -> None:
    """Load a few tensors, then lose their medium."""
    engine.model.load_weights(list(update.tensors.items())[:5])
    raise OSError("the medium went away")


async def test_update_that_fails_half_way_breaks_the_engine_and_the_next_one_serves(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = published(model)
    reader = MemoryReader(writer)
    engine = await engine_factory("vllm")(model, SETTINGS, reader)
    writer.stage(1, reader.load(0))
    writer.publish(1)
    request = GroupRequest("r", as_tokens([5, 6, 7]), (1, 2), Sampling(8))
    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "receive_weights", torn)
        with pytest.raises(EngineError, match="the medium went away"):
            await engine.load_weights(1, reader)
    assert engine.broken
    with pytest.raises(EngineError, match="down"):
        await engine.generate(request)
    engine.close()
    following = await engine_factory("vllm")(model, SETTINGS, reader)
    try:
        completions = await following.generate(request)
        assert {v for completion in completions for v in versions_of(completion)} == {1}
    finally:
        following.close()


async def test_model_with_narrow_heads_is_refused_by_name(tmp_path: Path) -> None:
    policy = small_policy()
    policy.config.head_dim = 16
    policy.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"found 16 in .*set generation.engine to 'torch'"):
        await engine_factory("vllm")(tmp_path, SETTINGS, MemoryReader(MemoryWriter()))


def test_head_widths_and_the_build_are_what_is_installed() -> None:
    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert installed_vllm("cpu")
    assert installed_vllm("cuda") is None


def test_tied_head_changes_with_the_embedding() -> None:
    """A checkpoint without `lm_head.weight` would leave vLLM's old one in place, silently."""
    subject = vllm_subject(tied=True)
    assert "lm_head.weight" not in subject.weights(1)
    engine = subject.make()
    engine.load_weights(subject.weights(1), version=1)
    (completion, *_) = run_all(engine, request_of())["r"]
    assert set(versions_of(completion)) == {1}
    assert_of_versions(subject, completion, request_of().prompt_tokens)


def test_logits_of_a_bfloat16_engine_are_the_trainer_s_to_the_last_bits_of_float32() -> None:
    """Of the same hidden states; bfloat16 logits would be off by 0.4%."""
    engine: Any = vllm_subject(dtype="bfloat16").make()
    worker = engine._core.llm.engine_core.engine_core.model_executor.driver_worker
    model = worker.model_runner.model
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.logits_processor.register_forward_hook(
        lambda _, inputs, logits: seen.append((inputs[1].clone(), logits.clone()))
    )
    (completion, *_) = run_all(engine, request_of(seeds=1))["r"]
    hook.remove()
    hidden_TH, logits_TV = map(torch.cat, zip(*seen, strict=True))
    assert (hidden_TH.dtype, logits_TV.dtype) == (torch.bfloat16, torch.float32)
    weight_VH = model.lm_head.weight[:VOCABULARY]
    assert weight_VH.dtype == torch.bfloat16
    targets_T = torch.tensor(completion.tokens, dtype=torch.int64)
    head = LinearHead(
        weight_VH, None, lambda each: each, 1.0, needs_entropy=False, entropy_has_gradient=False
    )
    trained_T, _ = linear_logprobs(hidden_TH, targets_T, head)
    assert completion.logprobs == pytest.approx(trained_T.numpy(), abs=1e-5)


def test_new_version_of_an_adapter_sends_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines with adapters sample is compared in the contract of all engines."""
    subject = vllm_subject(lora_rank=3)
    loads: list[str] = []
    receive = TransferEngine.receive_weights
    monkeypatch.setattr(
        TransferEngine, "receive_weights", lambda *each: [loads.append("base"), receive(*each)]
    )
    engine = subject.make()
    for version in (1, 2):
        engine.load_weights(subject.weights(version), version=version)
        (completion, *_) = run_all(engine, request_of())["r"]
        assert_of_versions(subject, completion, request_of().prompt_tokens)
    assert loads == ["base"]


def test_adapter_of_matrices_that_vllm_does_not_have_is_refused() -> None:
    subject = vllm_subject(lora_rank=3)
    base, adapter = split_adapter(subject.weights(0))
    adapter = {name.replace("layers.1.mlp", "layers.7.mlp"): adapter[name] for name in adapter}
    engine: Any = subject.make()
    engine._adapter = None  # as at its start
    with pytest.raises(ModelError, match=r"no matrices for 3 .* model\.layers\.7\.mlp\.down_proj"):
        engine.load_weights(base | adapter, version=1)


def test_speculation_saves_steps() -> None:
    """What it samples is compared in the contract of all engines."""
    engine = vllm_subject(speculates=True).make()
    engine.add(request_of(seeds=1, length=50))
    num_steps = 0
    while engine.has_work():
        engine.step()
        num_steps += 1
    assert num_steps < 50
