"""The head on a GPU: products of bfloat16 that stay in float32, in little memory."""

from __future__ import annotations

import pytest
import torch

from areal_flow.training.head import chunk_numbers
from areal_flow.training.sequences import pack_sequences
from tests.contracts.test_architectures import SUPPORTED, config_of, sharp_policy
from tests.unit.test_linear_logprobs import numbers_and_gradients, values_by
from tests.unit.test_trainer import make_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_logprobs_and_gradients_of_bfloat16_are_those_of_float64(is_compiled: bool) -> None:
    torch.manual_seed(0)
    hidden_MH, weight_VH = torch.randn(3000, 512), torch.randn(50_000, 512)
    targets_M = torch.randint(50_000, (3000,))
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        halves = hidden_MH.bfloat16().to(device, dtype).requires_grad_()
        weight = weight_VH.bfloat16().to(device, torch.promote_types(dtype, torch.float32))
        weight.requires_grad_()
        numbers = values_by(
            halves,
            weight,
            None,
            targets_M.to(device),
            is_compiled=is_compiled and dtype != torch.float64,
        )
        torch.stack(numbers).sin().sum().backward()  # type: ignore[no-untyped-call]
        assert halves.grad is not None
        assert weight.grad is not None
        results.append(
            [each.detach().double().cpu() for each in (*numbers, halves.grad, weight.grad)]
        )
    (logprobs, entropies, *gradients), (expected, expected_entropies, *expected_gradients) = results
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-4, rtol=1e-5)
    for left, right in zip(gradients, expected_gradients, strict=True):
        assert (left - right).norm() < 1e-2 * right.norm()


def test_memory_is_a_few_chunks_and_one_gradient() -> None:
    """Logits of all tokens would be 37 GiB."""
    hidden_MH = torch.randn(65_536, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.randn(150_000, 256, device="cuda", requires_grad=True)
    targets_M = torch.randint(150_000, (65_536,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs_M, entropy_M = values_by(hidden_MH, weight_VH, None, targets_M)
    (logprobs_M + entropy_M).sum().backward()  # type: ignore[no-untyped-call]
    used = torch.cuda.max_memory_allocated() - before
    num_bytes = 4 * chunk_numbers(hidden_MH.device)
    assert used < 4 * num_bytes + 2 * weight_VH.nbytes + 2 * hidden_MH.nbytes


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2", "Cohere", "GptOss"])
def test_a_policy_has_the_numbers_and_gradients_of_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        policy = sharp_policy(config_of(name, SUPPORTED[name])).to(device)
        micro = pack_sequences(make_sequences(), device=device)
        results.append([each.cpu() for each in numbers_and_gradients(policy, micro)])
    for left, right in zip(*results, strict=True):
        assert (left - right).norm() <= 1e-3 * right.norm() + 1e-4
