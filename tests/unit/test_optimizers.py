"""Optimizers by name: what they move, by how much, and what they continue from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.settings import LoraSettings
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.optimizers import (
    OPTIMIZERS,
    PolicyAdamW,
    PolicyMuon,
    PolicyOptimizer,
    is_layer_matrix,
)
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.settings import AdamWSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, settings

DECAY = AdamWSettings(weight_decay=0.3)


def optimizer_of(policy: Any, name: Any, **options: Any) -> PolicyOptimizer:
    chosen = TrainerSettings(optimizer=name, adamw=DECAY, **options)
    return OPTIMIZERS[name](policy.named_parameters(), chosen)


def give_gradients(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def updated(name: str, *, num_updates: int = 3, **options: Any) -> tuple[Any, PolicyOptimizer]:
    policy = small_policy()
    optimizer = optimizer_of(policy, name, **options)
    for seed in range(num_updates):
        give_gradients(policy, seed)
        optimizer.update(learning_rate=1e-2 / (1 + seed))
    return policy, optimizer


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def test_recipes_know_the_optimizers_that_there_are() -> None:
    assert {*get_args(TrainerSettings.model_fields["optimizer"].annotation)} == {*OPTIMIZERS}
    assert isinstance(optimizer_of(small_policy(), "adamw"), PolicyAdamW)


def test_muon_is_torchs_muon_on_matrices_of_layers_and_torchs_adamw_on_the_rest() -> None:
    updated_policy, _ = updated("muon", dtype="bfloat16")  # in which torch's own orthogonalises
    policy = small_policy()
    named = dict(policy.named_parameters())
    in_layers = {name: p for name, p in named.items() if ".layers." in name and p.ndim == 2}
    tables = [p for name, p in named.items() if name not in in_layers and p.ndim == 2]
    assert (len(in_layers), len(tables)) == (14, 2)
    decay = {"weight_decay": 0.3}
    muon = torch.optim.Muon(in_layers.values(), adjust_lr_fn="match_rms_adamw", **decay)
    vectors = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": tables, **decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for seed in range(3):
        give_gradients(policy, seed)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = 1e-2 / (1 + seed)
        muon.step()
        adamw.step()
    for name, expected in weights(policy).items():
        assert torch.equal(weights(updated_policy)[name], expected), name


def test_muon_moves_a_matrix_about_as_far_as_adamw_does() -> None:
    """Root mean square of an update: 0.2 of the rate (arXiv 2502.16982, section 2.2)."""
    for shape in [(64, 64), (96, 64), (64, 256)]:
        matrix = torch.nn.Parameter(torch.zeros(shape))
        optimizer = PolicyMuon([("layers.0.w", matrix)], TrainerSettings(optimizer="muon"))
        matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer.update(learning_rate=1.0)
        assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_matrices_of_layers_are_neither_tables_nor_experts_side_by_side() -> None:
    shapes = {
        "model.layers.3.mlp.up_proj.weight": (8, 4),
        "transformer.h.0.attn.c_attn.weight": (4, 12),
        "model.embed_tokens.weight": (8, 4),
        "lm_head.weight": (8, 4),
        "model.layers.3.mlp.experts.gate_up_proj": (2, 8, 4),
        "model.layers.3.input_layernorm.weight": (4,),
    }
    matrices = [
        n for n, s in shapes.items() if is_layer_matrix(n, torch.nn.Parameter(torch.zeros(s)))
    ]
    assert matrices == [*shapes][:2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_loaded_continues_to_the_same_bits(name: str) -> None:
    straight, _ = updated(name, num_updates=4)
    policy, optimizer = updated(name)
    state = {key: tensor.clone() for key, tensor in optimizer.named_state().items()}
    shapes = {key: tensor.shape for key, tensor in weights(policy).items()}
    assert {key.rpartition(".")[0] for key in state} == {*shapes}
    assert all(not t.ndim or t.shape == shapes[k.rpartition(".")[0]] for k, t in state.items())
    again = optimizer_of(policy, name)
    again.load_named_state(state)
    give_gradients(policy, 3)
    again.update(learning_rate=1e-2 / 4)
    for key, expected in weights(straight).items():
        assert torch.equal(weights(policy)[key], expected), key
    assert any(not torch.equal(state[key], t) for key, t in again.named_state().items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_empty_state_is_that_of_a_new_optimizer(name: str) -> None:
    policy, optimizer = updated(name)
    optimizer.load_named_state({})
    assert optimizer.named_state() == {}
    fresh = small_policy()
    fresh.load_state_dict(policy.state_dict())
    for each, moved in ((policy, optimizer), (fresh, optimizer_of(fresh, name))):
        give_gradients(each, 7)
        moved.update(learning_rate=1e-2)
    for key, expected in weights(fresh).items():
        assert torch.equal(weights(policy)[key], expected), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_frozen_or_without_gradient_stay(name: str) -> None:
    policy = small_policy()
    add_adapter(policy, LoraSettings(rank=2), seed=0)
    optimizer = optimizer_of(policy, name)
    before = {key: tensor.clone() for key, tensor in weights(policy).items()}
    give_gradients(policy, 0)
    still, *_ = optimizer.trainable
    still.grad = None
    optimizer.update(learning_rate=1e-2)
    moved = {key for key, tensor in weights(policy).items() if not torch.equal(before[key], tensor)}
    adapted = {key for key, p in policy.named_parameters() if p.requires_grad and p is not still}
    assert moved == adapted
    assert all("lora" in key for key in moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_order_of_sums_moves_weights_by_rounding_alone(name: Any) -> None:
    """As when the step of several ranks is replayed in one process."""

    def trained(num_ranks: int) -> tuple[dict[str, Tensor], list[float]]:
        chosen = TrainerSettings(optimizer=name, learning_rate=1e-3, tokens_per_micro_batch=32)
        backend = TrainerBackend(small_policy(), chosen, ReplicaGroup(num_ranks))
        steps = [
            train_step(backend, make_sequences(seed=step), step=step, settings=settings())
            for step in range(1, 7)
        ]
        return weights(backend.policy), [norm for step in steps for norm in step.grad_norms]

    (alone, norms), (shared, shared_norms) = trained(1), trained(2)
    for key, expected in alone.items():
        torch.testing.assert_close(shared[key], expected, rtol=0, atol=2e-5)
    assert shared_norms == pytest.approx(norms, rel=1e-5)


def test_training_with_muon_is_saved_restored_and_learns() -> None:
    def backend() -> TrainerBackend:
        chosen = TrainerSettings(optimizer="muon", learning_rate=1e-2, tokens_per_micro_batch=64)
        return TrainerBackend(small_policy(), chosen)

    def take(trained: TrainerBackend, step: int) -> float:
        result = train_step(trained, make_sequences(), step=step, settings=settings())
        return result.losses[0]

    straight, stopped = backend(), backend()
    losses = [take(straight, step) for step in range(1, 5)]
    assert all(later < earlier for earlier, later in pairwise(losses))
    for step in (1, 2):
        take(stopped, step)
    resumed = backend()
    resumed.load(*stopped.save())
    for step in (3, 4):
        take(resumed, step)
    assert resumed.fingerprint() == straight.fingerprint()
