"""Logits of last hidden states, by a policy's own forward alone.

So logit scaling and final soft-caps stay in. Letters: M chosen positions, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from areal_flow.policy.models.huggingface import BaseModelOutputWithPast


def logits_of(policy: Any, hidden_MH: Tensor) -> Tensor:
    """Return logits `[M, V]` of last hidden states, in the type of the master weights."""
    return _after_layers(policy, hidden_MH.to(policy.dtype))


def logits_of_products(policy: Any, products_MV: Tensor) -> Tensor:
    """Return the same of their products with the weights of `linear_head`: scaled, capped."""
    head = policy.get_output_embeddings()
    return _after_layers(policy, products_MV, {head: _stub(head, lambda given: given)})


def linear_head(policy: Any) -> nn.Linear | None:
    """Return the layer that multiplies last hidden states, if there is a plain one."""
    head = policy.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    hidden_1H = head.weight.new_zeros(1, head.in_features)
    taken: list[Tensor] = []

    def note(given: Tensor) -> Tensor:
        taken.append(given)
        return given.new_zeros(*given.shape[:-1], head.out_features)

    _after_layers(policy, hidden_1H, {head: _stub(head, note)})
    storages = {each.untyped_storage()._cdata for each in (hidden_1H, *taken)}
    return head if taken and len(storages) == 1 else None


def _after_layers(
    policy: Any, hidden_MH: Tensor, replaced: Mapping[nn.Module, nn.Module] | None = None
) -> Tensor:
    """Return what a policy's own forward makes of hidden states, which its layers do not compute.

    Some of its modules may be replaced; the policy itself is not touched.
    """
    layers, answer = policy.get_decoder(), _PrecomputedHidden(last_hidden_state=hidden_MH[None])
    rest = _replacing(policy, {layers: _stub(layers, lambda *_, **__: answer), **(replaced or {})})
    with torch.autocast(hidden_MH.device.type, enabled=False):
        return rest.forward().logits.flatten(0, 1)  # type: ignore[no-any-return]


def _stub(module: nn.Module, answer: Callable[..., Any]) -> Any:
    copied = _shallow_copy(module)
    copied.forward = answer
    return copied


def _replacing(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> Any:
    copied = _shallow_copy(module)
    copied._modules = {
        name: child and (replaced.get(child) or _replacing(child, replaced))
        for name, child in module._modules.items()
    }
    return copied


def _shallow_copy(module: nn.Module) -> Any:
    """Return a module with the same content; by `copy` those of FSDP would be made anew."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


class _PrecomputedHidden(BaseModelOutputWithPast):
    """What a policy's layers returned, as far as logits need it."""

    def __getattr__(self, name: str) -> None:
        """Return nothing for what mixtures of experts report besides."""
