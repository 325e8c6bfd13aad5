"""Log-probabilities without logits of all tokens, and attention by each sequence's own length."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_flow.policy.models import packed_layout
from areal_flow.policy.models.packed_layout import FREE_SCORES, PackedLayout, group_by_length
from areal_flow.policy.models.policy import logits_at, logits_of
from areal_flow.training import head
from areal_flow.training.head import token_logprobs, token_logprobs_and_entropies
from areal_flow.training.kernels import ATTENTION, PRODUCTS, _kept_operators
from areal_flow.training.sequences import pack_sequences
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, settings, state

VOCABULARY = 13


def numbers_with_chunks(
    chunk_numbers: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Tensor]:
    """Return log-probabilities, entropies and gradients where so many logits are a chunk."""
    monkeypatch.setattr(head, "AUTOGRAD_CHUNK_NUMBERS", chunk_numbers)
    policy = small_policy(tied=True)
    micro = pack_sequences(make_sequences())
    logprobs_M, entropy_M = token_logprobs_and_entropies(
        policy, micro, temperature=0.7, entropy_has_gradient=True
    )
    (logprobs_M.sin().sum() + entropy_M.square().sum()).backward()  # type: ignore[no-untyped-call]
    return [logprobs_M.detach(), entropy_M.detach(), *(p.grad for p in policy.parameters())]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_chunks_have_the_numbers_and_gradients_of_the_whole(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchunked = numbers_with_chunks(2**25, monkeypatch)
    chunked = numbers_with_chunks(rows * VOCABULARY, monkeypatch)
    for left, right in zip(unchunked, chunked, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-5)


def test_no_more_tokens_than_a_chunk_have_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows: list[int] = []

    def noted(policy: Any, hidden_MH: Tensor) -> Tensor:
        num_rows.append(len(hidden_MH))
        return logits_of(policy, hidden_MH)

    monkeypatch.setattr(head, "logits_of", noted)
    numbers_with_chunks(4 * VOCABULARY, monkeypatch)
    num_trained = sum(sequence.num_trained for sequence in make_sequences())
    assert max(num_rows) == 4
    assert sum(num_rows) == 2 * num_trained  # once for the loss, once for its gradients


def test_logprobs_are_those_of_all_logits() -> None:
    policy, micro = small_policy(), pack_sequences(make_sequences())
    logits_MV = logits_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
    expected = (logits_MV / 0.7).log_softmax(1).gather(1, micro.targets_M[:, None])[:, 0]
    logprobs = token_logprobs(policy, micro, temperature=0.7)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    assert not logprobs._is_view(), "FSDP warns of views"


@pytest.mark.parametrize("activations", ["selective", "recompute", "offload"])
def test_activations_change_no_bit_of_a_step(activations: Any) -> None:
    kept, recomputed = state(), state(activations=activations)
    for backend in (kept, recomputed):
        train_step(backend, make_sequences(), step=1, settings=settings())
    assert kept.fingerprint() == recomputed.fingerprint() != state().fingerprint()


def test_recomputed_layers_run_again_for_their_gradients() -> None:
    backend = state(activations="recompute")
    passes = []
    backend.policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    micro = pack_sequences(make_sequences())
    logprobs_M, _ = token_logprobs_and_entropies(
        backend.policy, micro, temperature=1.0, entropy_has_gradient=False
    )
    assert len(passes) == 1
    logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
    assert len(passes) == 2


class Operators(TorchDispatchMode):
    """Counts what is computed, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operators_of(activations: Any) -> tuple[Counter[str], Counter[str]]:
    """Return those of a forward and of a backward pass."""
    backend, micro = state(activations=activations), pack_sequences(make_sequences())
    with Operators() as forward:
        logprobs_M, _ = token_logprobs_and_entropies(
            backend.policy, micro, temperature=1.0, entropy_has_gradient=False
        )
    with Operators() as backward:
        logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
    return forward.counts, backward.counts


def test_selective_recomputation_leaves_out_products_and_attention() -> None:
    (forward, kept), (_, selective), (_, all_again) = map(
        operators_of, ("keep", "selective", "recompute")
    )
    assert any(all_again[name] > kept[name] for name in PRODUCTS)
    assert all(selective[name] == kept[name] for name in PRODUCTS)
    assert any(forward[name] for name in ATTENTION)
    assert not any(
        backward[name] for backward in (kept, selective, all_again) for name in ATTENTION
    )
    assert selective["aten.silu.default"] == all_again["aten.silu.default"] > 0


@pytest.mark.parametrize(("share", "recomputed"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.1, 0)])
def test_a_share_of_the_layers_is_recomputed(share: float, recomputed: int) -> None:
    settings = TrainerSettings(activations="recompute", recomputed_layers=share)
    kept = [_kept_operators(settings, index, compiled=False) for index in range(4)]
    assert kept.count(ATTENTION) == recomputed
    assert kept.count(ATTENTION | PRODUCTS) == 4 - recomputed
    assert kept[-1] == (ATTENTION if recomputed else ATTENTION | PRODUCTS)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_rows_attend_with_others_of_about_their_length(lengths: list[int]) -> None:
    groups = group_by_length(lengths, FREE_SCORES)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[row] for row in group)
        real = sum(lengths[row] ** 2 for row in group)
        assert len(group) * longest**2 - real <= max(0.05 * real, FREE_SCORES)


def test_few_long_sequences_do_not_lengthen_the_many_short_ones() -> None:
    lengths = [16_384 if row % 33 == 0 else 200 for row in range(990)]
    groups = group_by_length(lengths, FREE_SCORES)
    computed = sum(len(group) * max(lengths[row] for row in group) ** 2 for group in groups)
    assert computed <= 1.1 * sum(length**2 for length in lengths)
    assert len(groups) == 2


def test_groups_of_rows_see_what_each_sees_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layout, "FREE_SCORES", 0)
    policy, lengths = small_policy(), [3, 17, 1, 16, 9, 17, 4]
    assert len(group_by_length(lengths, 0)) > 3
    drawn = np.random.default_rng(0)
    rows = [torch.from_numpy(drawn.integers(0, VOCABULARY, length)) for length in lengths]
    packed_1T, everywhere = torch.cat(rows)[None], torch.arange(sum(lengths))
    with torch.no_grad():
        packed_TV = logits_at(policy, packed_1T, PackedLayout(lengths), everywhere)
        alone = [
            logits_at(policy, row[None], PackedLayout([len(row)]), torch.arange(len(row)))
            for row in rows
        ]
    torch.testing.assert_close(packed_TV, torch.cat(alone), atol=1e-4, rtol=1e-4)
