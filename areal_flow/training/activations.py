"""What layers keep for the backward pass: all that it needs, a part, or nothing but their input.

`selective` keeps what products and attention returned, and computes norms, rotations and
activation functions again. Layers that are compiled do so by themselves: torch's compiler computes
again what costs less than to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from areal_flow.policy.models.policy import layers_of
from areal_flow.training.kernels import compiles_layers
from areal_flow.training.settings import TrainerSettings

KEPT = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._grouped_mm.default",
        "mkldnn._linear_pointwise.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._flash_attention_forward.default",
        "torch_attn._varlen_attn.default",
    }
)
"""Products and attention, as torch's operators are called. FlexAttention is compiled, and computed
again."""


def choose_activations(model: Any, settings: TrainerSettings) -> None:
    """Have each layer keep what `trainer.activations` says.

    Without transformers' own switch, which asks for training mode.
    """
    copies: Copies = WeakValueDictionary()
    for layer in layers_of(model):
        if settings.activations == "recompute":
            layer.forward = partial(_recomputed, layer.forward, noop_context_fn)
        elif settings.activations == "selective" and not compiles_layers(settings):
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            layer.forward = partial(_recomputed, layer.forward, contexts)
        elif settings.activations == "offload":
            layer.forward = partial(_offloaded, layer, layer.forward, copies)


class MainMemoryCopy:
    """A tensor in main memory; on a GPU nobody waits for the copies.

    Looked up in this module at each call, so that the memory planner can replace it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._restored: Callable[[], Tensor | None] = lambda: None

    def restored(self) -> Tensor:
        """Return the tensor on its device: the same one for as long as somebody has it."""
        tensor = self._restored()
        if tensor is None:
            tensor = self._copy.to(self._device, non_blocking=True, copy=True)
            self._restored = ref(tensor)
        return tensor


Copies = WeakValueDictionary[Any, MainMemoryCopy]
"""Of all layers, which have some tensors in common; as long as a backward pass needs them."""


def _offloaded(
    layer: Any, forward: Callable[..., Any], copies: Copies, *given: Any, **named: Any
) -> Any:
    """Run a layer; what it keeps goes to main memory, each tensor once, but for its weights."""
    weights = {*map(_storage, layer.parameters())}

    def pack(tensor: Tensor) -> Tensor | MainMemoryCopy:
        storage = _storage(tensor)
        if storage in weights:
            return tensor
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (storage, tensor._version, *view)
        copy = copies.get(key)
        if copy is None:
            copy = copies[key] = MainMemoryCopy(tensor)
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        return forward(*given, **named)


def _storage(tensor: Tensor) -> Any:
    """Return what no later tensor's memory is equal to, as its address may be."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _unpacked(kept: Tensor | MainMemoryCopy) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.restored()


def _recomputed(forward: Callable[..., Any], contexts: Any, *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():  # where selected results would be kept for nothing
        return forward(*given, **named)
    how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(forward, *given, **how, **named)


def _policy(context: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    kept = str(operator) in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
