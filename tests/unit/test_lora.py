"""Adapters: what is trained, saved and exported of a policy with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, ModelError, TrainingError, WeightsError
from areal_flow.core.lease import Writer
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.lora import add_adapter, merge_scaled, split_adapter
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import (
    assign_tensors,
    check_adapter,
    empty_policy,
    load_policy,
    logits_at,
    policy_tensors,
)
from areal_flow.policy.settings import LoraSettings
from areal_flow.policy.tokenizer.directory import copy_model_description
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.policy.weights.shared_memory import ChosenChannel
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import read_checkpoint, take_snapshot, write_checkpoint
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.step import train_step
from pipelines import export
from pipelines.jobs import preflight
from tests.policies import served_weights, small_policy, write_model_directory
from tests.unit.test_trainer import make_sequences, settings

LORA = LoraSettings(rank=3, alpha=6.0)
IDS = torch.arange(1, 9)


def with_adapter(policy: Any, *, learning_rate: float = 1e-2) -> TrainerBackend:
    add_adapter(policy, LORA, seed=5)
    return TrainerBackend(policy, TrainerSettings(learning_rate=learning_rate))


def logits(policy: Any) -> Tensor:
    with torch.no_grad():
        return logits_at(policy, IDS[None], PackedLayout([len(IDS)]), torch.arange(len(IDS)))


def trained(*, steps: int = 2) -> TrainerBackend:
    backend = with_adapter(small_policy())
    for step in range(1, steps + 1):
        train_step(backend, make_sequences(seed=step), step=step, settings=settings())
    return backend


def test_adapter_alone_is_trained_and_what_is_served_computes_what_was_trained() -> None:
    backend, plain = trained(), small_policy()
    weights, adapter = split_adapter(policy_tensors(backend.policy))
    assert hash_tensors(weights) == hash_tensors(policy_tensors(plain))
    assert len(adapter) == 2 * 2 * 7, "of each linear map of each layer, and not of the head"
    before = logits(plain)
    assign_tensors(plain, served_weights(backend))
    torch.testing.assert_close(logits(plain), logits(backend.policy), atol=1e-3, rtol=1e-4)
    assert float((logits(plain) - before).abs().max()) > 0.05


def test_adapter_that_is_served_alone_gives_the_merged_weights_of_its_base() -> None:
    backend = trained()
    base, _ = split_adapter(policy_tensors(backend.policy))
    adapter = served_weights(backend, serves_adapter=True)
    assert {*adapter} == {*split_adapter(policy_tensors(backend.policy))[1]}
    merged, expected = merge_scaled(base | adapter), served_weights(backend)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(base[name], merged[name]) for name in base)
    writer = HashingWriter()
    hashes = [
        backend.stage(3, writer, dtype=torch.bfloat16, serves_adapter=alone)
        for alone in (False, True, True)
    ]
    assert len({each.weights_hash for each in hashes}) == 1
    assert hashes[0].served_hash != hashes[1].served_hash == hashes[2].served_hash


def test_fresh_adapter_changes_nothing_and_is_drawn_from_the_seed_alone() -> None:
    first, second = small_policy(), small_policy()
    add_adapter(first, LORA, seed=5)
    torch.manual_seed(77)
    add_adapter(second, LORA, seed=5)
    assert torch.equal(logits(first), logits(small_policy()))
    assert hash_tensors(policy_tensors(first)) == hash_tensors(policy_tensors(second))


def test_reference_is_the_policy_without_its_adapter() -> None:
    """The adapter is active again for the gradient."""
    backend = trained()
    how = replace(settings(), algorithm=DecoupledPPO(num_minibatches=1, kl_coefficient=0.1))
    own = TrainerBackend(small_policy(), TrainerSettings(learning_rate=1e-2))
    own.hold_reference(small_policy())
    assign_tensors(own.policy, served_weights(backend))
    divergences = [
        train_step(each, make_sequences(seed=9), step=3, settings=how).metrics[
            "kl_policy_reference"
        ]
        for each in (backend, own)
    ]
    assert divergences[0].value == pytest.approx(divergences[1].value, rel=1e-3)
    assert divergences[0].value > 1e-4
    assert backend.optimizer.named_state()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


@pytest.fixture
def backend(model: Path, tmp_path: Path) -> TrainerBackend:
    """With checkpoints of steps 0 and 7, an update between them."""
    backend = with_adapter(load_policy(model))
    write(backend, tmp_path, step=0)
    train_step(backend, make_sequences(seed=1), step=1, settings=settings())
    write(backend, tmp_path, step=7)
    return backend


def write(backend: TrainerBackend, tmp_path: Path, *, step: int) -> None:
    for folder in ("checkpoints", "writers"):
        (tmp_path / folder).mkdir(exist_ok=True)
    copy_model_description(tmp_path / "model", tmp_path / "description")
    state = CheckpointState(step, backend.fingerprint(), 0, "config")
    snapshot, writer = take_snapshot(backend, state, LORA), Writer(tmp_path / "writers", 1)
    write_checkpoint(tmp_path / "checkpoints", tmp_path / "description", snapshot, writer)


def test_checkpoints_have_the_adapter_alone_and_the_base_once(
    backend: TrainerBackend, model: Path, tmp_path: Path
) -> None:
    first, later = (tmp_path / "checkpoints" / f"{step:08d}" for step in (0, 7))
    assert (first / "model.safetensors").exists()
    assert not (later / "model.safetensors").exists()
    other = with_adapter(empty_policy(model))
    assert read_checkpoint(later, other).step == 7
    for each in (backend, other):
        train_step(each, make_sequences(seed=2), step=8, settings=settings())
    assert backend.fingerprint() == other.fingerprint()
    (first / "model.safetensors").unlink()
    with pytest.raises(TrainingError, match="cannot be read"):
        read_checkpoint(later, other)
    with pytest.raises(ModelError, match="in that of step 0 beside it"):
        load_policy(later)


def test_generator_adds_the_base_of_checkpoint_0_to_a_published_adapter(
    backend: TrainerBackend, tmp_path: Path
) -> None:
    first = tmp_path / "checkpoints" / "00000000"
    trainer = ChosenChannel(tmp_path / "weights", "directory")
    backend.stage(7, trainer, dtype=torch.float32, serves_adapter=True)
    trainer.publish(7)
    assert trainer.num_bytes(7) == sum(
        tensor.nbytes for tensor in split_adapter(policy_tensors(backend.policy))[1].values()
    )
    generator = ChosenChannel(tmp_path / "weights", "directory", base=first)
    merged = merge_scaled(generator.load(7))
    for name, tensor in served_weights(backend).items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-5)
    content = bytearray((first / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (first / "model.safetensors").write_bytes(content)
    generator = ChosenChannel(tmp_path / "weights", "directory", base=first)
    with pytest.raises(WeightsError, match="to which the adapters belong"):
        generator.load(7)


def test_export_is_a_plain_model_and_an_adapter_that_peft_loads(
    backend: TrainerBackend, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    first, later = (tmp_path / "checkpoints" / f"{step:08d}" for step in (0, 7))
    export.export_model(later, tmp_path / "plain")
    export.export_adapter(later, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    base = AutoModelForCausalLM.from_pretrained(first)
    assert not list((tmp_path / "plain").glob("*adapter*"))
    with torch.no_grad():
        untrained = base(IDS[None]).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(plain(IDS[None]).logits, loaded(IDS[None]).logits)
    assert float((loaded(IDS[None]).logits - untrained).abs().max()) > 1e-3
    merged = loaded.merge_and_unload()
    assert hash_tensors(policy_tensors(merged)) == hash_tensors(served_weights(backend))
    assert hash_tensors(policy_tensors(plain)) == hash_tensors(served_weights(backend))


def test_mistakes_are_reported_before_anything_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"target_modules = 'q_proj_x'.*not found"):
        check_adapter(model, LoraSettings(rank=2, target_modules="q_proj_x"))
    check_adapter(model, LoraSettings(rank=2, target_modules="q_proj, v_proj"))
    with pytest.raises(ModelError, match="which has no adapter: leave it out"):
        export.export_adapter(model, tmp_path / "adapter")
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    recipe = build_recipe({"trainer": {"lora": {"rank": 2}}}, source="")
    with pytest.raises(ConfigError, match=r"pip install '\.\[lora\]'"):
        preflight.check_devices(recipe)
