"""Linear layers that oneDNN multiplies on a CPU: in float32 where MKL is slow, and to decode.

In PyTorch's builds for x86, MKL uses the widest vectors of Intel's processors only, oneDNN those of
all processors, which is twice as fast (`docs/decisions/0017-products-by-onednn.md`). The choice
depends on the machine and on shapes alone, never on measured times: a replayed step must have the
same bits.

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

MIN_PRODUCTS = 2**20
"""R K N below which calling oneDNN costs more than it saves."""

MIN_WIDTH = 64
"""Minimum number of inputs and outputs: narrower layers leave wide vectors empty."""


def swap_linear_layers(model: nn.Module) -> None:
    """Make oneDNN compute a model's linear layers, in place, on processors where it is faster."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and min(module.weight.shape) >= MIN_WIDTH:
            module.__class__ = OneDnnLinear


@lru_cache
def onednn_is_faster() -> bool:
    """Return whether this processor has wide vectors that MKL does not use."""
    return (
        platform.machine() == "x86_64"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _cpu_vendor() not in ("", "GenuineIntel")
    )


@lru_cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16, and oneDNN can use that."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.cpu._is_avx512_bf16_supported()


def _cpu_vendor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ""
    fields = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


class OneDnnLinear(nn.Linear):
    """A linear layer whose large float32 products on the CPU are computed by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        is_plain = input.dtype == torch.float32 and input.device.type == "cpu"
        if not is_plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        rows_RK = input.reshape(-1, self.in_features)
        multiply: Any = _Linear.apply if torch.is_grad_enabled() else linear
        outputs_RN: Tensor = multiply(rows_RK, self.weight, self.bias)
        return outputs_RN.view(*input.shape[:-1], self.out_features)


def pack_linear_layers(model: nn.Module, *, num_rows: int) -> None:
    """Make oneDNN decode with reordered copies of bfloat16 weights, on a CPU that supports it.

    PyTorch's own layers reorder them for each product, which takes longer than a product of few
    rows. Call it again after new weights.

    Args:
        num_rows: the usual number of rows in a product.
    """
    for module in model.modules():
        if (
            isinstance(module, nn.Linear)
            and module.weight.dtype == torch.bfloat16
            and module.weight.device.type == "cpu"
            and multiplies_bfloat16()
        ):
            module.__class__ = PackedLinear
            reorder = torch.ops.mkldnn._reorder_linear_weight
            module.packed_NK = reorder(module.weight.detach(), num_rows)


class PackedLinear(nn.Linear):
    """A linear layer without gradients, with a copy of its weights in oneDNN's order."""

    packed_NK: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows_RK = input.reshape(-1, self.in_features)
        multiply = torch.ops.mkldnn._linear_pointwise
        outputs_RN: Tensor = multiply(rows_RK, self.packed_NK, self.bias, "none", [], "")
        return outputs_RN.view(*input.shape[:-1], self.out_features)


def linear(rows_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias` of float32 matrices on the CPU, without a gradient."""
    num_products = rows_RK.shape[0] * weight_NK.numel()
    if num_products < MIN_PRODUCTS or not onednn_is_faster():
        return nn.functional.linear(rows_RK, weight_NK, bias_N)
    # The operator that PyTorch's own compiler calls for linear layers on the CPU.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows_RK, weight_NK, bias_N, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """`linear` with gradients, which are computed by `linear`, too."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows_RK if needs_weight else None, weight_NK if needs_rows else None)
        return linear(rows_RK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RN: Tensor) -> tuple[Tensor | None, ...]:
        rows_RK, weight_NK = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(gradient_RN, weight_NK.T) if needs_rows else None,
            linear(gradient_RN.T, rows_RK.T) if needs_weight else None,
            gradient_RN.sum(0) if needs_bias else None,
        )
