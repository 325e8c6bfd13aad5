"""A linear head's numbers in chunks: exact, with one weight gradient and little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from areal_flow.policy.models import segments
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.models.policy import linear_head, logits_of, logits_of_products
from areal_flow.policy.settings import LoraSettings
from areal_flow.training import head
from areal_flow.training.head import LinearHead, token_logprobs_and_entropies
from areal_flow.training.sequences import MicroBatch, pack_sequences
from tests.contracts.test_architectures import SUPPORTED, config_of, sharp_policy
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences

VOCABULARY, HIDDEN = 13, 8


def plain(logits: Tensor) -> Tensor:
    return logits


def scaled(logits: Tensor) -> Tensor:
    return logits / 4


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2) * 2


def values_by(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_M: Tensor,
    transform: Callable[[Tensor], Tensor] = plain,
    *,
    is_compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    linear_head = LinearHead(
        weight_VH,
        bias_V,
        transform,
        0.7,
        needs_entropy=True,
        entropy_has_gradient=True,
        is_compiled=is_compiled,
    )
    return head.linear_logprobs(hidden_MH, targets_M, linear_head)


@pytest.mark.parametrize("transform", [plain, scaled, capped])
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_values_and_gradients_equal_a_plain_softmax(
    rows: int,
    has_bias: bool,
    is_compiled: bool,
    transform: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CHUNK_NUMBERS", "CPU_CHUNK_NUMBERS"):
        monkeypatch.setattr(head, name, rows * VOCABULARY)
    monkeypatch.setattr(segments, "has_fused_kernels", lambda device: rows == 3)
    torch.manual_seed(0)
    drawn = ((7, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if has_bias else []))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in drawn]
    targets_M = torch.randint(VOCABULARY, (7,))
    hidden_MH, weight_VH, bias_V = leaves if has_bias else (*leaves, None)
    actual = values_by(hidden_MH, weight_VH, bias_V, targets_M, transform, is_compiled=is_compiled)
    products_MV = hidden_MH @ weight_VH.T + (0.0 if bias_V is None else bias_V)
    logprobs_MV = (transform(products_MV) / 0.7).log_softmax(1)
    expected = (
        logprobs_MV.gather(1, targets_M[:, None])[:, 0],
        -(logprobs_MV.exp() * logprobs_MV).sum(1),
    )
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(2, 7, dtype=torch.float64)
    gradients, expected_gradients = (
        torch.autograd.grad((torch.stack(each) * weights).sum(), leaves)
        for each in (actual, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


def test_products_of_bfloat16_stay_in_float32() -> None:
    """Rounded to bfloat16, logits of 20 would be off by up to 0.06."""
    torch.manual_seed(0)
    hidden_MH, weight_VH = torch.randn(64, 256), torch.randn(500, 256)
    weight_VH.requires_grad_()
    targets_M = torch.randint(500, (64,))
    halves = hidden_MH.bfloat16().requires_grad_()
    logprobs_M, entropy_M = values_by(halves, weight_VH, None, targets_M)
    exact_MH = halves.detach().double().requires_grad_()
    exact_VH = weight_VH.detach().bfloat16().double().requires_grad_()
    expected_M, expected_entropy_M = values_by(exact_MH, exact_VH, None, targets_M)
    assert logprobs_M.dtype == torch.float32
    torch.testing.assert_close(logprobs_M.double(), expected_M, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy_M.double(), expected_entropy_M, atol=1e-4, rtol=0)
    for each in (logprobs_M + entropy_M, expected_M + expected_entropy_M):
        each.sin().sum().backward()
    for gradient, exact in ((halves.grad, exact_MH.grad), (weight_VH.grad, exact_VH.grad)):
        assert (gradient.double() - exact).norm() < 5e-3 * exact.norm()
    assert weight_VH.grad.dtype == torch.float32


def test_weight_gradient_of_halves_is_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an operation that only GPUs have: here by what its documentation says."""

    def reference(
        total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        assert total.dtype == out.dtype == out_dtype == torch.float32
        return out.copy_(total + left.float() @ right.float())

    monkeypatch.setattr(torch, "addmm", reference)
    torch.manual_seed(0)
    total_VH, left_Vm, right_mH = torch.randn(9, 4), torch.randn(9, 5), torch.randn(5, 4)
    expected_VH = total_VH + left_Vm.bfloat16().float() @ right_mH.bfloat16().float()
    head._add_product(total_VH, left_Vm.bfloat16(), right_mH.bfloat16(), torch.bfloat16)
    torch.testing.assert_close(total_VH, expected_VH)


def test_a_bfloat16_pass_on_a_cpu_does_not_change_other_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "logits_of", None)
    left, right = torch.randn(2, 256, 256)
    before = left @ right
    with torch.autocast("cpu", torch.bfloat16):
        numbers_and_gradients(small_policy(tied=True), pack_sequences(make_sequences()))
    assert torch.equal(left @ right, before)


class Allocated(TorchDispatchMode):
    """Records type and shape of each tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_given = any(output is each for each in (kwargs or {}).values())
        if isinstance(output, Tensor) and not func.is_view and not is_given:
            self.made.append((output.dtype, tuple(output.shape)))
        return output


def test_memory_holds_a_chunk_s_logits_and_one_float32_matrix_of_the_weights_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "has_fused_kernels", lambda device: True)
    with FakeTensorMode(), Allocated() as mode:
        hidden_MH = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
        weight_VH = torch.empty(150_000, 256, requires_grad=True)
        targets_M = torch.empty(4096, dtype=torch.int64)
        mode.made.clear()
        logprobs_M, entropy_M = values_by(hidden_MH, weight_VH, None, targets_M, capped)
        (logprobs_M + entropy_M).sum().backward()
    assert max(torch.Size(shape).numel() for _, shape in mode.made) <= 2**26
    # The matrix that is multiplied, in each of the passes, and the gradient.
    of_weights = [dtype for dtype, shape in mode.made if shape == (150_000, 256)]
    assert of_weights == [torch.bfloat16, torch.bfloat16, torch.float32]


def numbers_and_gradients(policy: Any, micro: MicroBatch) -> list[Tensor]:
    logprobs_M, entropy_M = token_logprobs_and_entropies(
        policy, micro, temperature=0.7, entropy_has_gradient=True
    )
    (logprobs_M.sin().sum() + entropy_M.square().sum()).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return [logprobs_M.detach(), entropy_M.detach(), *gradients]


@pytest.mark.parametrize(
    "name", ["tied", "Gemma2", "Cohere", "Granite", "GptOss", "OPT", "adapter"]
)
def test_a_policy_has_the_numbers_and_gradients_of_its_own_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 5 * VOCABULARY)
    policy = policy_called(name)
    micro = pack_sequences(make_sequences())
    expected = numbers_and_gradients(policy, micro)
    monkeypatch.setattr(segments, "has_fused_kernels", lambda device: True)
    monkeypatch.setattr(head, "logits_of", None)
    for actual, reference in zip(numbers_and_gradients(policy, micro), expected, strict=True):
        assert (actual - reference).norm() <= 1e-5 * reference.norm() + 1e-4  # OPT's keys have none


def policy_called(name: str) -> Any:
    if name in SUPPORTED:
        return sharp_policy(config_of(name, SUPPORTED[name]))
    policy = small_policy(tied=True)
    if name == "adapter":
        add_adapter(policy, LoraSettings(rank=2))
    return policy


def test_heads_that_are_no_plain_last_layer_are_left_to_the_policy() -> None:
    """An adapter on the head, and a layer between the last hidden state and the head."""
    adapted, between = small_policy(), small_policy()
    add_adapter(adapted, LoraSettings(rank=2, target_modules="q_proj,lm_head"))
    between.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    assert linear_head(small_policy()) is not None
    assert linear_head(adapted) is None
    assert linear_head(between) is None


def test_a_policy_is_the_same_after_its_logits_were_computed_apart() -> None:
    """Nothing of it is replaced meanwhile: compiled layers would notice."""
    policy = small_policy()
    before = {name: dict(module.__dict__) for name, module in policy.named_modules()}
    hidden_MH = torch.randn(3, 64)
    products_MV = hidden_MH @ policy.lm_head.weight.T
    torch.testing.assert_close(logits_of(policy, hidden_MH), products_MV)
    torch.testing.assert_close(logits_of_products(policy, products_MV), products_MV)
    assert {name: dict(module.__dict__) for name, module in policy.named_modules()} == before
