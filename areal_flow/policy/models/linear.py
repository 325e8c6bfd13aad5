"""Linear layers on a CPU that oneDNN multiplies: in float32 where MKL is slow, and to decode.

MKL, in PyTorch's builds for x86, uses the widest vectors of Intel's processors only; oneDNN, in the
same builds, those of any maker: twice as fast (`docs/decisions/0017-products-by-onednn.md`).
What multiplies is a matter of the machine and of shapes alone, never of measured times: a step's
bits must be those of its replay.

Letters: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEWEST_PRODUCTS = 2**20
"""R K N below which the call of oneDNN costs more than it saves."""

LEAST_WIDTH = 64
"""Of inputs and outputs: narrower layers leave wide vectors empty."""


def swap_linear_layers(model: nn.Module) -> None:
    """Have oneDNN compute a model's linear layers, in place, on processors where it is faster."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and min(module.weight.shape) >= LEAST_WIDTH:
            module.__class__ = OneDnnLinear


@lru_cache
def onednn_is_faster() -> bool:
    """Return whether this processor has wide vectors that MKL does not use."""
    return (
        platform.machine() == "x86_64"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _maker() not in ("", "GenuineIntel")
    )


@lru_cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 by itself, and oneDNN can tell it to."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.cpu._is_avx512_bf16_supported()


def _maker() -> str:
    described = Path("/proc/cpuinfo")
    if not described.is_file():
        return ""
    fields = (line.partition(":") for line in described.read_text().splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


class OneDnnLinear(nn.Linear):
    """A linear layer whose products are oneDNN's where they are large float32 ones on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        is_plain = input.dtype == torch.float32 and input.device.type == "cpu"
        if not is_plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        rows_RK = input.reshape(-1, self.in_features)
        multiply: Any = _Linear.apply if torch.is_grad_enabled() else linear
        outputs_RN: Tensor = multiply(rows_RK, self.weight, self.bias)
        return outputs_RN.view(*input.shape[:-1], self.out_features)


def pack_linear_layers(model: nn.Module, *, num_rows: int) -> None:
    """Have oneDNN decode with copies of bfloat16 weights in its own order, on a CPU that can.

    PyTorch's own layers order them anew for each few rows, which takes longer than to multiply.
    Call it again after new weights.

    Args:
        num_rows: how many are multiplied together, most of the time.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and _is_packable(module.weight):
            module.__class__ = PackedLinear
            reorder = torch.ops.mkldnn._reorder_linear_weight
            module.packed_NK = reorder(module.weight.detach(), num_rows)


def _is_packable(weight_NK: Tensor) -> bool:
    on_cpu = weight_NK.device.type == "cpu" and multiplies_bfloat16()
    return on_cpu and weight_NK.dtype == torch.bfloat16


class PackedLinear(nn.Linear):
    """A linear layer without gradients, whose weights oneDNN has in an order of its own, too."""

    packed_NK: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows_RK = input.reshape(-1, self.in_features)
        multiply = torch.ops.mkldnn._linear_pointwise
        outputs_RN: Tensor = multiply(rows_RK, self.packed_NK, self.bias, "none", [], "")
        return outputs_RN.view(*input.shape[:-1], self.out_features)


def linear(rows_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias` of float32 matrices on the CPU, without a gradient."""
    num_products = rows_RK.shape[0] * weight_NK.numel()
    if num_products < FEWEST_PRODUCTS or not onednn_is_faster():
        return nn.functional.linear(rows_RK, weight_NK, bias_N)
    # The operator that PyTorch's own compiler calls for linear layers on the CPU.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows_RK, weight_NK, bias_N, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """`linear` with gradients, which are two such products again."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows_RK if needs_weight else None, weight_NK if needs_rows else None)
        return linear(rows_RK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RN,) = gradients
        rows_RK, weight_NK = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(gradient_RN, weight_NK.T) if needs_rows else None,
            linear(gradient_RN.T, rows_RK.T) if needs_weight else None,
            gradient_RN.sum(0) if needs_bias else None,
        )
