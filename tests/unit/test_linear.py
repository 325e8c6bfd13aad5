"""Linear layers by oneDNN: the same numbers, gradients and names as PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from areal_flow.policy.models import linear as module
from areal_flow.policy.models.linear import (
    MIN_WIDTH,
    OneDnnLinear,
    PackedLinear,
    linear,
    multiplies_bfloat16,
    onednn_is_faster,
    pack_linear_layers,
    swap_linear_layers,
)
from areal_flow.policy.models.policy import disable_dropout_and_move
from tests.policies import small_policy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN"
)
SHAPES = [(300, 64, 96), (0, 64, 96), (1, 64, 96), (4096, 64, 80), (64, 1024, 64)]
"""Rows, inputs and outputs: of large products, of small ones and of none."""


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "onednn_is_faster", lambda: True)
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_those_of_float64(
    shape: tuple[int, int, int], has_bias: bool
) -> None:
    num_rows, num_inputs, num_outputs = shape
    torch.manual_seed(0)
    exact = nn.Linear(num_inputs, num_outputs, bias=has_bias, dtype=torch.float64)
    layer = nn.Linear(num_inputs, num_outputs, bias=has_bias)
    layer.load_state_dict(exact.state_dict())
    swap_linear_layers(layer)
    assert isinstance(layer, OneDnnLinear)
    rows = torch.randn(1, num_rows, num_inputs, dtype=torch.float64, requires_grad=True)
    rows_32 = rows.detach().float().requires_grad_()
    weights = torch.randn(1, num_rows, num_outputs, dtype=torch.float64)
    expected, actual = exact(rows), layer(rows_32)
    (expected * weights).sum().backward()
    (actual * weights.float()).sum().backward()
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    exact_gradients = [rows.grad, *(parameter.grad for parameter in exact.parameters())]
    gradients = [rows_32.grad, *(parameter.grad for parameter in layer.parameters())]
    for gradient, want in zip(gradients, exact_gradients, strict=True):
        assert gradient is not None
        assert want is not None
        assert (gradient.double() - want).norm() <= 1e-5 * want.norm()


def test_bits_depend_on_neither_gradients_nor_earlier_calls() -> None:
    layer = nn.Linear(256, 128)
    swap_linear_layers(layer)
    rows = torch.randn(512, 256)
    with torch.no_grad():
        outputs = [layer(rows) for _ in range(3)]
    assert all(torch.equal(each, layer(rows)) for each in outputs)


def test_frozen_weights_have_no_gradient_and_frozen_inputs_none() -> None:
    layer = nn.Linear(256, 128)
    swap_linear_layers(layer)
    layer.weight.requires_grad_(False)
    rows = torch.randn(512, 256, requires_grad=True)
    layer(rows).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert rows.grad is not None


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_only_tensors_that_gradients_need_are_kept(frozen: str) -> None:
    layer = nn.Linear(256, 128, bias=False)
    swap_linear_layers(layer)
    layer.weight.requires_grad_(frozen != "weight")
    rows = torch.randn(512, 256, requires_grad=frozen != "rows")
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda nothing: nothing):
        layer(rows)
    assert [tensor.shape for tensor in kept] == [(128, 256) if frozen == "weight" else (512, 256)]


@pytest.mark.skipif(not multiplies_bfloat16(), reason="needs a processor with bfloat16")
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_weights_are_multiplied_as_those_in_order_until_they_are_packed_again(
    has_bias: bool,
) -> None:
    layer = nn.Linear(256, 130, bias=has_bias, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.inference_mode():
            layer.weight.normal_()
            pack_linear_layers(layer, num_rows=16)
            assert type(layer) is PackedLinear
            for shape in ((256,), (16, 1, 256), (1, 70, 256)):
                rows = torch.randn(shape, dtype=torch.bfloat16)
                expected = nn.functional.linear(rows, layer.weight, layer.bias)
                torch.testing.assert_close(layer(rows), expected, rtol=8e-3, atol=8e-2)
    assert [*layer.state_dict()] == ["weight", "bias"][: 1 + has_bias]


def test_weights_of_float32_are_not_packed() -> None:
    layer = nn.Linear(256, 128)
    pack_linear_layers(layer, num_rows=16)
    assert type(layer) is nn.Linear


def test_vector_is_one_row() -> None:
    layer, vector = nn.Linear(256, 128), torch.randn(256)
    expected = layer(vector)
    swap_linear_layers(layer)
    torch.testing.assert_close(layer(vector), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_use_pytorchs_layers(dtype: torch.dtype) -> None:
    layer = nn.Linear(256, 128, dtype=dtype)
    rows = torch.randn(512, 256, dtype=dtype)
    expected = layer(rows)
    swap_linear_layers(layer)
    assert torch.equal(layer(rows), expected)


def test_autocast_is_pytorchs() -> None:
    layer, rows = nn.Linear(256, 128), torch.randn(512, 256)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(rows)
        swap_linear_layers(layer)
        output = layer(rows)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)


def test_small_products_use_pytorchs_layers() -> None:
    rows, weight = torch.randn(8, 64), torch.randn(96, 64)
    assert torch.equal(linear(rows, weight), nn.functional.linear(rows, weight))


def test_policy_keeps_its_names_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as slower:
        slower.setattr(module, "onednn_is_faster", lambda: False)
        plain = small_policy()
    names = [*plain.state_dict()]
    policy = disable_dropout_and_move(plain, "cpu")
    layers = [m for m in policy.modules() if isinstance(m, nn.Linear)]
    wide = [layer for layer in layers if min(layer.weight.shape) >= MIN_WIDTH]
    assert 0 < len(wide) < len(layers)
    assert all((type(layer) is OneDnnLinear) == (layer in wide) for layer in layers)
    assert [*policy.state_dict()] == names


def test_layers_are_not_replaced_where_pytorch_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onednn_is_faster", lambda: False)
    layer = nn.Linear(2, 3)
    swap_linear_layers(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(
    ("maker", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_onednn_is_chosen_by_the_processor_alone(
    maker: str, capability: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_cpu_vendor", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    onednn_is_faster.cache_clear()
    try:
        assert onednn_is_faster() is faster
    finally:
        onednn_is_faster.cache_clear()
