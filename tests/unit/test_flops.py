"""How many operations a step needs, against those that torch counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from areal_flow.config import LoraSettings, TrainerSettings
from areal_flow.models import linear
from areal_flow.models.lora import add_adapter
from areal_flow.trainer import sequences as training_sequences
from areal_flow.trainer.backend import TrainerBackend
from areal_flow.trainer.flops import PolicyShape
from areal_flow.trainer.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, sequence_of, settings


@pytest.mark.parametrize(
    ("num_minibatches", "rank", "num_prompt_tokens"), [(1, 0, 0), (4, 0, 0), (1, 2, 0), (2, 0, 40)]
)
def test_formula_gives_the_operations_that_torch_counts(
    num_minibatches: int, rank: int, num_prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the members of a group share a long prompt."""
    monkeypatch.setattr(training_sequences, "LEAST_MULTIPLE", 1)
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


def test_attention_of_a_shared_prompt_counts_once() -> None:
    """A prompt of 4, completions of 2 and 3: 16 pairs, and 36 - 16 and 49 - 16 beside them."""
    first, other = (sequence_of([1, 2, 3, 4], [5] * n, [0.0] * n, [True] * n) for n in (2, 3))
    shape = PolicyShape(num_weights=0, head=0, attention=3, trains_weights=True)
    assert shape.forward_flops([[first, other]]) == 2 * 3 * (16 + 20 + 33)
    assert shape.forward_flops([[first], [other]]) == 2 * 3 * (36 + 49)
