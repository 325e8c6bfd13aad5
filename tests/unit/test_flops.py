"""How many operations a step needs, against those that torch counts."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from areal_flow.config import LoraSettings, TrainerSettings
from areal_flow.models import linear
from areal_flow.models.lora import add_adapter
from areal_flow.trainer import sequences as training_sequences
from areal_flow.trainer.flops import PolicyShape
from areal_flow.trainer.replicated import ReplicatedBackend
from areal_flow.trainer.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, settings


@pytest.mark.parametrize(("num_minibatches", "rank"), [(1, 0), (4, 0), (1, 2)])
def test_formula_gives_the_operations_that_torch_counts(
    num_minibatches: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_sequences, "LEAST_MULTIPLE", 1)
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)  # torch counts its own alone
    policy, sequences = small_policy(), make_sequences(16)
    if rank:
        add_adapter(policy, LoraSettings(rank=rank))
    how = settings(num_minibatches=num_minibatches)
    shape = PolicyShape.of(policy)
    assert shape is not None
    backend = ReplicatedBackend(policy, TrainerSettings())
    with FlopCounterMode(display=False) as counter:
        train_step(backend, sequences, step=1, settings=how)
    expected = shape.step_flops(sequences, how.algorithm)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.08)
