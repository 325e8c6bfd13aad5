"""A trainer's kernels follow from its settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.kernels import compiles_layers, set_precision
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    set_precision(TrainerSettings())


@pytest.mark.parametrize(
    ("device", "kernels", "compiled"),
    [
        ("cuda:1", "compiled", True),
        ("cuda", "eager", False),
        ("cuda", "deterministic", False),
        ("cpu", "compiled", False),
    ],
)
def test_layers_are_compiled_on_a_gpu_unless_it_is_switched_off(
    device: str, kernels: Any, compiled: bool
) -> None:
    assert compiles_layers(TrainerSettings(device=device, kernels=kernels)) is compiled


def test_float32_is_multiplied_in_tf32_if_the_recipe_says_so() -> None:
    for dtype, allowed in (("tf32", True), ("float32", False), ("tf32", True), ("bfloat16", False)):
        set_precision(TrainerSettings(dtype=dtype))  # type: ignore[arg-type]
        assert torch.backends.cuda.matmul.allow_tf32 is allowed


def test_tf32_leaves_a_cpu_as_it_is() -> None:
    steps = [stepped(dtype=dtype) for dtype in ("float32", "tf32")]
    assert steps[0] == steps[1]


def stepped(algorithm: str = "decoupled_ppo", **settings: Any) -> list[Any]:
    backend = TrainerBackend(small_policy(), TrainerSettings(learning_rate=1e-3, **settings))
    chosen = ALGORITHMS[algorithm](num_minibatches=2, kl_coefficient=0.1)
    backend.hold_reference(small_policy(seed=1))
    if chosen.needs_critic:
        backend.add_critic(chosen)  # type: ignore[arg-type]
    how = StepSettings(chosen, temperature=1.0, seed=0)
    return [
        train_step(backend, make_sequences(), step=1, settings=how).losses,
        backend.fingerprint(),
    ]


class Operators(TorchDispatchMode):
    """Records operators on float tensors, including backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, Tensor) and each.is_floating_point() for each in args):
            self.called.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


WITHOUT_ORDER = {"cumsum", "kthvalue", "median", "histc", "bincount", "put_", "scatter_reduce"}
"""At these torch raises on a GPU alone (`torch.use_deterministic_algorithms`)."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_needs_no_operator_that_is_not_deterministic(algorithm: str) -> None:
    """Torch raises at one that is known to it; a CPU's bits are the same either way."""
    with Operators() as operators:
        deterministic = stepped(algorithm, kernels="deterministic", activations="selective")
    assert "mm" in operators.called
    assert not operators.called & WITHOUT_ORDER
    assert torch.are_deterministic_algorithms_enabled()
    assert deterministic == stepped(algorithm)
    assert not torch.are_deterministic_algorithms_enabled()
