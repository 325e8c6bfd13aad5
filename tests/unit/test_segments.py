"""Attention on a GPU, as far as a CPU can tell: choices, arguments and numbers of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention, varlen

from areal_flow.policy.models import segments
from areal_flow.policy.models.attention import AttentionRule
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.paged import Chunk, PagedCache, prefill
from areal_flow.policy.models.probe import probe_config
from areal_flow.policy.models.segments import (
    BLOCK,
    Segments,
    attend_by_cudnn,
    attend_by_flex,
    attend_by_varlen,
    choose_kernels,
    has_fused_kernels,
)
from areal_flow.training import head, parallel
from areal_flow.training.parallel import ContextLayout
from tests.contracts.test_architectures import SUPPORTED, config_of
from tests.policies import small_policy
from tests.unit.test_shared_prompts import logprobs_and_gradients, sequence

PLACES = [
    np.arange(5),
    np.array([0, 1, 2, 5, 6]),  # shares the first one's prompt of three
    np.array([7]),
    np.array([0, 1, 2, *range(8, 15)]),
    np.arange(15, 24),
]


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """The documented result of `varlen_attn`, with masks aligned to a segment's last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key))
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for segment in range(len(cu_seq_q) - 1):
        queries, keys, values = (
            each[ends[segment] : ends[segment + 1]]
            for each, ends in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
        )
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        distance = torch.arange(len(keys)) - torch.arange(len(queries))[:, None]
        distance -= len(keys) - len(queries)
        hidden = distance > window_size[1]
        if window_size[0] >= 0:
            hidden |= distance < -window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def attended_alone(
    places: list[NDArray[np.int64]], packed: list[Tensor], rule: AttentionRule
) -> Tensor:
    """Return values `[T, H, D]` of each token in its own sequence, by a plain softmax."""
    output = torch.zeros_like(packed[0])
    for places_L in places:
        query, key, value = (each[torch.from_numpy(places_L)] for each in packed)
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        at = torch.arange(len(query))
        visible = at[:, None] >= at
        if rule.window is not None:
            visible &= at[:, None] - at < rule.window
        weights = scores.exp() * visible
        total = weights.sum(-1, keepdim=True)
        if rule.sinks is not None:
            total = total + rule.sinks.exp()[:, None, None]
        output = output.index_copy(
            0, torch.from_numpy(places_L), torch.einsum("hqk,khd->qhd", weights / total, value)
        )
    return output


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts take the kernels of a GPU: flash attention by its reference, Flex by itself."""
    monkeypatch.setattr(segments, "has_fused_kernels", lambda device: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    let_flex_have_gradients(monkeypatch)


def let_flex_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses them on a CPU, where it computes all scores and can differentiate them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def let_all_segments_use(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(*layer: Any, has_cudnn: bool) -> list[Any]:
        return [kernel] * len(layer[-1])

    monkeypatch.setattr(segments, "choose_kernels", kernels)


BFLOAT16 = torch.bfloat16
SINKS = torch.tensor([1.5, -0.5, 0.25, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "widths", "rule", "kernel"),
    [
        (BFLOAT16, (128, 128), AttentionRule(1.0), attend_by_varlen),
        (torch.float16, (64, 64), AttentionRule(1.0, window=9), attend_by_varlen),
        (BFLOAT16, (256, 256), AttentionRule(1.0), attend_by_varlen),
        (BFLOAT16, (264, 264), AttentionRule(1.0), attend_by_flex),
        (BFLOAT16, (20, 20), AttentionRule(1.0), attend_by_flex),
        (BFLOAT16, (192, 128), AttentionRule(1.0), attend_by_flex),
        (BFLOAT16, (128, 128), AttentionRule(1.0, softcap=50.0), attend_by_flex),
        (BFLOAT16, (64, 64), AttentionRule(1.0, sinks=torch.zeros(4)), attend_by_flex),
        (torch.float32, (128, 128), AttentionRule(1.0), attend_by_flex),
    ],
)
def test_kernel_by_what_a_layer_asks_for(
    dtype: torch.dtype, widths: tuple[int, int], rule: AttentionRule, kernel: Any
) -> None:
    assert choose_kernels(dtype, widths, rule, [(9, 9)], has_cudnn=True) == [kernel]


@pytest.mark.parametrize(
    ("lengths", "change", "num_by_cudnn"),
    [
        ([(16_384, 16_384)], {}, 1),
        ([(6_000, 6_000), (5_999, 5_999), (9_000, 9_000)], {}, 2),
        ([(9_000, 9_200)], {}, 0),  # a completion after a prompt that others share
        ([(16_384, 16_384)], {"has_cudnn": False}, 0),
        ([(16_384, 16_384)], {"widths": (192, 192)}, 0),
        ([(16_384, 16_384)], {"rule": AttentionRule(1.0, window=4096)}, 0),
        ([(16_384, 16_384)], {"rule": AttentionRule(1.0, window=16_384)}, 1),
        ([(16_384, 16_384)], {"dtype": torch.float32}, 0),
        ([(16_384, 16_384)], {"rule": AttentionRule(1.0, softcap=50.0)}, 0),
    ],
)
def test_long_sequences_of_plain_layers_are_cudnn_s(
    lengths: list[tuple[int, int]], change: dict[str, Any], num_by_cudnn: int
) -> None:
    layer = {"dtype": BFLOAT16, "widths": (128, 128), "rule": AttentionRule(1.0), "has_cudnn": True}
    kernels = choose_kernels(lengths=lengths, **{**layer, **change})
    assert len(kernels) == len(lengths)
    assert kernels.count(attend_by_cudnn) == num_by_cudnn


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_row_that_mixes_kernels_has_the_values_and_gradients_of_each_sequence(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    by_length = {5: attend_by_cudnn, 9: attend_by_cudnn, 1: attend_by_varlen}

    def mixed(*_: Any, **others: Any) -> list[Any]:
        lengths = Segments.of(PLACES, "cpu")._query_lengths
        own = Segments.of(PLACES, "cpu")._key_lengths
        return [
            by_length.get(num, attend_by_varlen) if num == num_keys else attend_by_varlen
            for num, num_keys in zip(lengths, own, strict=True)
        ]

    monkeypatch.setattr(segments, "choose_kernels", mixed)
    torch.manual_seed(0)
    packed = [
        torch.randn(24, num, 8, dtype=torch.float64, requires_grad=True)
        for num in (4, heads, heads)
    ]
    weights = torch.randn(24, 4, 8, dtype=torch.float64)
    actual = Segments.of(PLACES, "cpu").attend(*packed, AttentionRule(0.3))
    expected = attended_alone(PLACES, packed, AttentionRule(0.3))
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    for gradient, of_expected in zip(
        torch.autograd.grad((actual * weights).sum(), packed),
        torch.autograd.grad((expected * weights).sum(), packed),
        strict=True,
    ):
        torch.testing.assert_close(gradient, of_expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_only_devices_with_fused_kernels_use_them(device: str, expected: bool) -> None:
    assert has_fused_kernels(torch.device(device)) is expected


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        (attend_by_varlen, AttentionRule(0.3)),
        (attend_by_varlen, AttentionRule(0.3, window=3)),
        (attend_by_varlen, AttentionRule(0.3, window=1)),
        (attend_by_flex, AttentionRule(0.3)),
        (attend_by_flex, AttentionRule(0.3, window=3, softcap=0.5)),
        (attend_by_flex, AttentionRule(0.3, sinks=SINKS)),
        (attend_by_flex, AttentionRule(0.3, window=2, softcap=0.7, sinks=SINKS)),
    ],
)
def test_kernels_and_their_gradients_are_those_of_each_sequence_alone(
    kernel: Callable[..., Tensor], rule: AttentionRule, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of shared prompts, too, in float64."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    let_all_segments_use(kernel, monkeypatch)
    let_flex_have_gradients(monkeypatch)
    torch.manual_seed(0)
    packed = [
        torch.randn(24, num, 8, dtype=torch.float64, requires_grad=True)
        for num in (4, heads, heads)
    ]
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks.clone().requires_grad_())
    leaves = [*packed, *([] if rule.sinks is None else [rule.sinks])]
    weights = torch.randn(24, 4, 8, dtype=torch.float64)
    actual = Segments.of(PLACES, "cpu").attend(packed[0], packed[1], packed[2], rule)
    expected = attended_alone(PLACES, packed, rule)
    tolerance = 1e-6 if rule.sinks is not None else 1e-10  # sinks are float32
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    gradients = torch.autograd.grad((actual * weights).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=tolerance, rtol=tolerance)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 100, 400]),
)
@settings(deadline=None, max_examples=50)
def test_blocks_hold_all_that_is_visible_and_full_ones_nothing_else(
    drawn: list[tuple[int, int]], window: int | None
) -> None:
    lengths = [num for num, _ in drawn], [num + before for num, before in drawn]
    mask = Segments(*lengths, "cpu").block_mask(window)
    num_queries, num_keys = sum(lengths[0]), sum(lengths[1])
    assert mask.shape[-2:] == (num_queries, num_keys)
    visible = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    query_at = key_at = 0
    for num, num_seen in zip(*lengths, strict=True):
        distance = torch.arange(num)[:, None] + num_seen - num - torch.arange(num_seen)
        sees = (distance >= 0) & (distance < (window or num_seen))
        visible[query_at : query_at + num, key_at : key_at + num_seen] = sees
        query_at, key_at = query_at + num, key_at + num_seen
    queries, keys = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    assert torch.equal(mask.mask_mod(None, None, queries, keys), visible)
    full = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = blocks_of(mask.kv_num_blocks, mask.kv_indices)
    for row, column in np.ndindex(full.shape):
        block = visible[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        assert not (full[row, column] and partial[row, column])
        assert bool(block.all()) or not full[row, column]
        assert not block.any() or full[row, column] or partial[row, column]


def blocks_of(counts: Tensor, numbers: Tensor) -> NDArray[np.bool_]:
    listed = np.zeros(numbers.shape[2:], np.bool_)
    for row, count in enumerate(counts[0, 0].tolist()):
        listed[row, numbers[0, 0, row, :count].numpy()] = True
    return listed


def test_flex_attention_is_compiled_for_all_lengths_once_a_soft_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as its graph: the code of a GPU is not made. With gradients to come."""
    let_flex_have_gradients(monkeypatch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled, random = segments.flex_attention.__wrapped__("cuda"), np.random.default_rng(0)
    torch._dynamo.reset()
    graphs, num_before = [], counters["stats"]["unique_graphs"]
    for length in (1, 300, *random.integers(2, 600, 18)):
        row = Segments([length, 7], [length, 7], "cpu")
        for rule in (AttentionRule(0.3, softcap=50.0), AttentionRule(0.3, 90, 30.0)):
            packed = [torch.randn(length + 7, num, 16) for num in (4, 2, 2)]
            monkeypatch.setattr(
                segments, "flex_attention", lambda device: flex_attention.flex_attention
            )
            expected = attend_by_flex(row, *packed, rule)
            monkeypatch.setattr(segments, "flex_attention", lambda device: compiled)
            actual = attend_by_flex(row, *(each.requires_grad_() for each in packed), rule)
            torch.testing.assert_close(actual, expected)
        graphs.append(counters["stats"]["unique_graphs"] - num_before)
    torch._dynamo.reset()
    assert graphs[1:] == [graphs[-1]] * 19
    assert graphs[-1] <= 4, "a block, and several; for each soft-cap"


def test_a_long_sequence_s_blocks_are_the_half_below_the_diagonal() -> None:
    mask = Segments([BLOCK * 32], [BLOCK * 32], "cpu").block_mask(None)
    assert int(mask.full_kv_num_blocks.sum()) == 32 * 31 // 2
    assert int(mask.kv_num_blocks.sum()) == 32


def test_sequences_without_a_common_prompt_keep_their_keys_where_they_are() -> None:
    assert Segments.of([np.arange(3), np.arange(3, 9)], "cpu").keys is None
    assert Segments.of(PLACES, "cpu").keys is not None
    repeated = Segments.of([np.arange(3), np.arange(3)], "cpu")  # an empty completion
    assert repeated.query_ends.tolist() == [0, 3]


def test_queries_in_float32_are_multiplied_in_the_type_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary positions leave them so; under autocast, and where weights are bfloat16."""
    dtypes: list[torch.dtype] = []

    def noted(
        segments: Segments, query: Tensor, key: Tensor, value: Tensor, _: AttentionRule
    ) -> Tensor:
        dtypes.extend([query.dtype, key.dtype, value.dtype])
        return query

    monkeypatch.setattr(segments, "attend_by_varlen", noted)
    query, key, value = torch.randn(3, 24, 2, 8).unbind()
    row = Segments.of(PLACES, "cpu")
    row.attend(query, key, value.bfloat16(), AttentionRule(1.0))
    with torch.autocast("cpu", BFLOAT16):
        row.attend(query, key, value, AttentionRule(1.0))
    assert dtypes == [BFLOAT16] * 6


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *((attend_by_varlen, name) for name in ("Qwen2", "Mistral", "DeepseekV3")),
        *((attend_by_flex, name) for name in ("Qwen2", "Mistral", "DeepseekV3")),
        (attend_by_flex, "Gemma2"),
        (attend_by_flex, "GptOss"),
    ],
)
def test_packed_and_prefilled_passes_by_kernels_are_the_model_s_own(
    kernel: Any, name: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_all_segments_use(kernel, monkeypatch)
    probe_config(config_of(name, SUPPORTED[name]), max_model_len=64)


@pytest.mark.parametrize("kernel", [attend_by_varlen, attend_by_flex])
def test_gradients_of_a_policy_by_kernels_are_those_of_the_cpu_s_rows(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    rows = [sequence([1, 2, 3], num, num) for num in (4, 9, 1)] + [sequence([5], 6)]
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 5 * 13)
    policy = small_policy().double()
    expected, expected_gradients = logprobs_and_gradients(policy, [rows])
    request.getfixturevalue("as_on_a_gpu")
    let_all_segments_use(kernel, monkeypatch)
    logprobs, gradients = logprobs_and_gradients(policy, [rows])
    assert (logprobs - expected).abs().max() < 1e-5  # the CPU's head is float32
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize("kernel", [attend_by_varlen, attend_by_flex])
def test_chunks_that_follow_pages_attend_by_kernels_as_by_rows(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The first chunk of one sequence, the second ones of two that share the page of the first."""
    policy = small_policy()

    def logits() -> Tensor:
        cache = PagedCache(policy, num_pages=5, page_tokens=4)
        pages, other, third = np.array([3, 0, 1]), np.array([3, 4]), np.array([2])
        prefill(policy, cache, [Chunk(np.arange(1, 6), 0, pages)])
        chunks = [
            Chunk(np.array([7, 8, 9, 1]), 5, pages),
            Chunk(np.array([2, 6]), 4, other),
            Chunk(np.array([5, 5, 5]), 0, third),
        ]
        return prefill(policy, cache, chunks)

    with torch.no_grad():
        expected = logits()
        request.getfixturevalue("as_on_a_gpu")
        let_all_segments_use(kernel, monkeypatch)
        torch.testing.assert_close(logits(), expected, atol=1e-4, rtol=1e-4)


def test_ranks_exchange_queries_and_keys_in_the_type_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchanged = []
    monkeypatch.setattr(parallel, "exchange", lambda p, _: exchanged.append(p.dtype) or p)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    query, key, value = (torch.randn(1, num, 24, 8) for num in (4, 2, 2))
    with torch.autocast("cpu", BFLOAT16):
        layout = ContextLayout(PackedLayout([24]), alone)
        layout.attend(0, query, key, value.bfloat16(), AttentionRule(0.3))
    assert exchanged == [BFLOAT16] * 4


class Rank:
    """One of two ranks as threads: what context parallelism needs of a process group."""

    def __init__(self, rank: int, barrier: Barrier, sent: dict[int, Tensor]) -> None:
        self._rank, self._barrier, self._sent = rank, barrier, sent

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def exchange(self, parts: Tensor) -> Tensor:
        self._sent[self._rank] = parts
        self._barrier.wait(10)
        received = torch.stack([self._sent[rank][self._rank] for rank in range(2)])
        self._barrier.wait(10)
        return received


@pytest.mark.parametrize("by_kernel", [False, True])
def test_ranks_that_share_a_row_each_take_the_sinks_of_their_heads(
    by_kernel: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if by_kernel:
        request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(parallel, "exchange", lambda parts, rank: rank.exchange(parts))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, num, 24, 8) for num in (4, 2, 2))
    rule = AttentionRule(0.3, window=4, sinks=SINKS.float())
    row, barrier, sent = PackedLayout([5, 12, 7]), Barrier(2), dict[int, Tensor]()

    def attended(rank: int) -> Tensor:
        layout = ContextLayout(row, Rank(rank, barrier, sent))
        own = (each[:, :, layout.slice] for each in (query, key, value))
        return layout.attend(0, *own, rule)

    with ThreadPoolExecutor(2) as threads:
        actual = torch.cat([*threads.map(attended, range(2))], dim=1)
    torch.testing.assert_close(actual, row.attend(0, query, key, value, rule))
