"""Attention on a GPU: each kernel's numbers and gradients are those of the CPU's rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_flow.policy.models.attention import AttentionRule
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.segments import attend_by_flex, attend_by_varlen, choose_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPT, LENGTHS = 150, (40, 300, 1, 129)
SINKS = torch.tensor([1.5, -0.5, 0.25, 3.0])


def places() -> list[np.ndarray]:
    """Three completions of one prompt, and a sequence of its own."""
    ends = np.cumsum([PROMPT, *LENGTHS])
    own = [np.arange(end - length, end) for end, length in zip(ends[1:], LENGTHS, strict=True)]
    return [*(np.concatenate([np.arange(PROMPT), each]) for each in own[:3]), own[3]]


def attended(device: str, dtype: torch.dtype, width: int, rule: AttentionRule) -> list[Tensor]:
    """Return values, and gradients of queries, keys and values, float64 on the CPU."""
    torch.manual_seed(0)
    num_tokens = PROMPT + sum(LENGTHS)
    columns = [
        torch.randn(1, heads, num_tokens, width).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(1, num_tokens, 4, width).to(device, dtype)
    layout = PackedLayout([len(each) for each in places()], device, places=places())
    output = layout.attend(0, *columns, rule)
    (output * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [each.detach().double().cpu() for each in (output, *(c.grad for c in columns))]


@pytest.mark.parametrize(
    ("dtype", "width", "rule"),
    [
        (torch.bfloat16, 128, AttentionRule(0.09)),
        (torch.bfloat16, 64, AttentionRule(0.12, window=70)),
        (torch.bfloat16, 64, AttentionRule(0.12, softcap=2.0)),
        (torch.bfloat16, 64, AttentionRule(0.12, window=70, sinks=SINKS)),
        (torch.float32, 64, AttentionRule(0.12)),
        (torch.float32, 8, AttentionRule(0.3, window=70)),
    ],
)
def test_values_and_gradients_are_those_of_the_cpu(
    dtype: torch.dtype, width: int, rule: AttentionRule
) -> None:
    (kernel,) = choose_kernels(dtype, (width, width), rule, [(9, 9)], has_cudnn=True)
    plain = dtype == torch.bfloat16 and rule.softcap is None and rule.sinks is None
    assert kernel is (attend_by_varlen if plain else attend_by_flex)
    sinks = None if rule.sinks is None else rule.sinks.cuda()
    on_gpu = attended(
        "cuda", dtype, width, AttentionRule(rule.scale, rule.window, rule.softcap, sinks)
    )
    expected = attended("cpu", torch.float64, width, rule)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for left, right in zip(on_gpu, expected, strict=True):
        assert (left - right).norm() <= tolerance * right.norm()


def test_a_long_row_has_no_scores_in_memory() -> None:
    """Its scores would be 8 GiB a head; what attention needs grows with its tokens alone."""
    length, width = 2**16, 64
    for dtype, softcap in ((torch.bfloat16, None), (torch.bfloat16, 2.0), (torch.float32, None)):
        layout = PackedLayout([length], "cuda")
        query, key, value = (
            torch.randn(1, heads, length, width, device="cuda", dtype=dtype, requires_grad=True)
            for heads in (4, 1, 1)
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layout.attend(0, query, key, value, AttentionRule(0.1, softcap=softcap)).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 16 * query.nbytes


def test_gradients_repeat_their_bits_with_deterministic_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for rule in (AttentionRule(0.1), AttentionRule(0.1, softcap=2.0)):
            runs = [attended("cuda", torch.bfloat16, 64, rule) for _ in range(3)]
            for again in runs[1:]:
                assert all(map(torch.equal, runs[0], again))
    finally:
        torch.use_deterministic_algorithms(False)
