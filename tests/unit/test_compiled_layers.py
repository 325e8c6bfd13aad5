"""Compiled layers have the values and gradients of uncompiled ones, whatever surrounds them.

Uses torch's compiler up to code generation for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from areal_flow.core.types import Rendezvous
from areal_flow.training import kernels
from areal_flow.training.replicas import ReplicaGroup, connect_ranks, leave_ranks
from tests.sharded_ranks import TRAININGS, Training, begin, take_step

SLOW = pytest.mark.slow
SELECTIVE = Training(trainer={"activations": "selective"})
CASES = {
    **{name: TRAININGS[name] for name in ("plain", "recompute", "offload", "bfloat16")},
    **{name: TRAININGS[name] for name in ("adapter", "critic")},
    "selective": SELECTIVE,
}


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def steps_of(
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    *,
    compiled: bool,
    replicas: ReplicaGroup | None = None,
) -> list[float]:
    """Return losses and gradient norms of steps whose micro-batches have rows of many lengths."""
    monkeypatch.setattr(kernels, "compiles_layers", lambda settings: compiled)
    backend, numbers_of_steps, graphs = begin(training, replicas), [], set[int]()
    for step in (1, 2, 3):
        numbers = take_step(backend, step, training)
        numbers_of_steps += [*numbers.losses, *numbers.grad_norms]
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1, f"other rows were compiled again: {graphs}"
    return numbers_of_steps


@pytest.mark.parametrize(
    "name",
    [
        # The policy beside a critic is the plain one.
        pytest.param(name, marks=() if name in ("selective", "critic") else SLOW)
        for name in CASES
    ],
)
def test_steps_have_the_losses_and_gradients_of_uncompiled_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps_of(CASES[name], monkeypatch, compiled=False)
    assert not counters["stats"]
    compiled = steps_of(CASES[name], monkeypatch, compiled=True)
    # Losses are sums of terms of both signs: what is rounded of them does not shrink with the sum.
    tolerance = {"rel": 2e-2, "abs": 1e-3} if name == "bfloat16" else {"rel": 1e-4}
    assert compiled == pytest.approx(expected, **tolerance)
    # Four graphs a layer, with gradients and without; an adapter is off for a reference.
    assert 4 <= counters["stats"]["unique_graphs"] <= (16 if name == "adapter" else 8)


@SLOW
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_rows_of_weights_are_gathered_around_compiled_layers(
    activations: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = Training(trainer={"activations": activations})
    expected = steps_of(training, monkeypatch, compiled=False)
    replicas = connect_ranks(Rendezvous("one", 0, 1), tmp_path / "point", host="127.0.0.1")
    try:
        compiled = steps_of(training, monkeypatch, compiled=True, replicas=replicas)
    finally:
        leave_ranks()
    assert compiled == pytest.approx(expected, rel=1e-4)
    assert 4 <= counters["stats"]["unique_graphs"] <= 8
