"""The number of operations of a step, against torch's counter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_flow.algorithms.registry import M2PO, PPO, ActorCriticPPO
from areal_flow.planning.gpus import GPUS
from areal_flow.policy.models import linear
from areal_flow.policy.models.linear import swap_linear_layers
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.settings import LoraSettings
from areal_flow.training import flops
from areal_flow.training import sequences as training_sequences
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.flops import PolicyShape, matrix_rate, peak_rate
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, sequence_of, settings


@pytest.mark.parametrize(
    ("num_minibatches", "rank", "num_prompt_tokens"), [(1, 0, 0), (4, 0, 0), (1, 2, 0), (2, 0, 40)]
)
def test_formula_gives_the_operations_that_torch_counts(
    num_minibatches: int, rank: int, num_prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the members of a group share a long prompt."""
    monkeypatch.setattr(training_sequences, "PAD_MULTIPLE", 1)
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)  # torch counts its own alone
    policy, sequences = small_policy(), make_sequences(16)
    if num_prompt_tokens:
        prompts = [np.full(num_prompt_tokens, 1 + s.group, np.int32) for s in sequences]
        pairs = zip(sequences, prompts, strict=True)
        sequences = [replace(s, prompt_tokens=prompt) for s, prompt in pairs]
    if rank:
        add_adapter(policy, LoraSettings(rank=rank))
    how = settings(num_minibatches=num_minibatches)
    shape = PolicyShape.of(policy)
    assert shape is not None
    shape = replace(shape, attention=0)  # torch counts none on a CPU
    backend = TrainerBackend(policy, TrainerSettings())
    with FlopCounterMode(display=False) as counter:
        numbers = train_step(backend, sequences, step=1, settings=how)
    expected = shape.step_flops(sequences, numbers.plan, how.algorithm)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.08)
    if num_prompt_tokens:
        alone = [[[[index]] for index in range(len(sequences))]]
        assert shape.step_flops(sequences, alone, how.algorithm) > 2 * expected


@pytest.mark.parametrize("which", ["critic", "teacher", "m2po"])
def test_other_models_of_a_step_count_with_their_own_size(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic has a head of one output, a teacher wider layers; M2PO's bound reads it again."""
    monkeypatch.setattr(training_sequences, "PAD_MULTIPLE", 1)
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)
    policy = small_policy(vocab_size=2000)
    config = deepcopy(policy.config)
    config.intermediate_size = 800
    teacher = type(policy)(config)
    swap_linear_layers(teacher)
    divergence: dict[str, Any] = {"kl_coefficient": 0.1, "num_minibatches": 1}
    algorithms = {
        "critic": ActorCriticPPO(num_minibatches=1),
        "teacher": PPO(**divergence),
        "m2po": M2PO(kl_in="advantage", **divergence),
    }
    algorithm = algorithms[which]
    shape, of_teacher = PolicyShape.of(policy), PolicyShape.of(teacher)
    assert shape is not None
    assert of_teacher is not None
    backend = TrainerBackend(policy, TrainerSettings())
    if isinstance(algorithm, ActorCriticPPO):
        backend.add_critic(algorithm)
    else:
        backend.hold_reference(teacher)
    how, sequences = StepSettings(algorithm, temperature=1.0, seed=0), make_sequences(16)
    with FlopCounterMode(display=False) as counter:
        numbers = train_step(backend, sequences, step=1, settings=how)
    shape, of_teacher = (replace(each, attention=0) for each in (shape, of_teacher))
    expected = shape.step_flops(sequences, numbers.plan, algorithm, of_teacher)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.08)


def test_attention_of_a_shared_prompt_counts_once() -> None:
    """A prompt of 4, completions of 2 and 3: 16 pairs, and 36 - 16 and 49 - 16 beside them."""
    first, other = (sequence_of([1, 2, 3, 4], [5] * n, [0.0] * n, [True] * n) for n in (2, 3))
    shape = PolicyShape(num_weights=0, hidden=0, head=0, attention=3, trains_weights=True)
    assert shape.forward_flops([[first, other]]) == 2 * 3 * (16 + 20 + 33)
    assert shape.forward_flops([[first], [other]]) == 2 * 3 * (36 + 49)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40", None),
    ],
)
def test_utilization_is_of_the_data_sheet_of_a_known_gpu(name: str, tflops: float | None) -> None:
    assert peak_rate(name, "bfloat16") == (tflops and tflops * 1e12)
    assert peak_rate(name, "float32") is None


def test_planner_and_utilization_have_the_same_data_sheets() -> None:
    planned = {name: gpu.flops for name, gpu in GPUS.items() if name != "CPU"}
    spelled = {name: name.replace("RTX", "RTX ").replace("-", " ") for name in planned}
    assert planned == {name: peak_rate(spelled[name], "bfloat16") for name in planned}


def test_rate_is_of_random_matrices_and_draws_nothing_from_the_global_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H100 multiplies ones at 801 TFLOP/s where it multiplies random numbers at 764."""
    multiplied: list[torch.Tensor] = []
    monkeypatch.setattr(flops, "linear", lambda rows, weight: multiplied.append(weight))
    flops._measured_rate.cache_clear()
    before = torch.get_rng_state()
    assert matrix_rate("cpu", "float32") > 0
    flops._measured_rate.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(multiplied) == flops.TRIALS
    assert all(0.9 < float(matrix.std()) < 1.1 for matrix in multiplied)
