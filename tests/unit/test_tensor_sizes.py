"""No tensor of a GPU's training step is larger than any activation should be.

Of the step that `areal-flow plan --memory` traces, on tensors without content.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from areal_flow.planning import memory
from areal_flow.planning.memory import trainer_memory
from areal_flow.policy.models.huggingface import AutoConfig
from areal_flow.training import head
from tests.unit.test_memory_plan import SHAPE, recipe

NUM_TOKENS, VOCABULARY, CHUNK_NUMBERS = 4096, 8192, 2**22
"""Chunks of an eighth of the logits, as of 4,096 of 32,768 tokens: what is large for a row is so
for a shorter one with shorter chunks, and each operation takes as long."""

COPIES = ("_to_copy", "clone", "add", "sub", "mul", "div")
"""Operators whose result is as large as what they are given."""


class Watched(memory.FakeDevice):
    """Raises where a tensor is larger than any activation should be, or a copy of weights is
    float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: set[StorageWeakRef] = set()
        """Storages of weights, and of what was made of one by itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.weights |= {storage(t) for t in given if is_weight(t)}
        sizes = {t.numel() for t in given if storage(t) in self.weights}
        before = {storage(each) for each in given}
        output = super().__torch_dispatch__(func, types, args, kwargs)
        for made in (each for each in tree_leaves(output) if isinstance(each, Tensor)):
            assert made.numel() < NUM_TOKENS**2, f"{func}: the scores of one head"
            assert made.numel() < NUM_TOKENS * VOCABULARY / 4, f"{func}: logits"
            is_new = storage(made) not in before
            if is_new and made.numel() in sizes and str(func).split(".")[1] in COPIES:
                assert made.dtype != torch.float32, f"{func}: weights in float32 once more"
                self.weights.add(storage(made))
        return output


def is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.numel() >= 64 * SHAPE["hidden_size"]


def storage(tensor: Tensor) -> StorageWeakRef:
    """Not by its address, which a later one may have."""
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        ({}, {}),
        ({"kl_coefficient": 0.1}, {"activations": "selective"}),
        ({"kl_coefficient": 0.1}, {"lora": {"rank": 4}}),
        ({"kl_coefficient": 0.1, "reference_top_k": 64}, {}),
        ({}, {"activations": "offload"}),
        ({"name": "ppo_critic"}, {}),
    ],
    ids=["plain", "reference", "adapter", "likely tokens", "offload", "critic"],
)
def test_no_tensor_of_a_step_is_of_all_scores_or_of_all_logits_or_weights_once_more(
    algorithm: dict[str, Any], trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Watched] = []
    monkeypatch.setattr(memory, "FakeDevice", lambda: watched.append(Watched()) or watched[0])
    monkeypatch.setattr(head, "CHUNK_NUMBERS", CHUNK_NUMBERS)
    shape = AutoConfig.for_model(
        "qwen2", **{**SHAPE, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    )
    on_gpu = {"tokens_per_micro_batch": NUM_TOKENS, "dtype": "bfloat16", "device": "cuda"}
    trainer_memory(recipe(algorithm=algorithm, **on_gpu, **trainer), shape)
    assert watched[0].weights


def test_too_large_tensors_are_detected() -> None:
    with FakeTensorMode(), Watched():
        weight = nn.Parameter(torch.empty(256, 128))
        halves = weight.bfloat16()
        with pytest.raises(AssertionError, match="once more"):
            halves.t().contiguous().float()
        with pytest.raises(AssertionError, match="scores"):
            torch.empty(NUM_TOKENS, 1) @ torch.empty(1, NUM_TOKENS)
        with pytest.raises(AssertionError, match="logits"):
            torch.empty(NUM_TOKENS // 4, 128) @ torch.empty(128, VOCABULARY)
