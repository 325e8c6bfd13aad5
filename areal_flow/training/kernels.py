"""How a trainer computes: precision, deterministic kernels, and what its layers run and keep.

Layers may be compiled. For the backward pass they keep all activations, or a part. `selective`
keeps what products and attention returned, and computes norms, rotations and activation functions
again. Compiled layers do so by themselves: torch's compiler recomputes what costs less than to read
it. `recompute` keeps a layer's input and what attention returned, whose work grows with the square
of a sequence's length; with `recomputed_layers` it does so for a share of the layers only, and the
others are `selective`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from areal_flow.policy.models.attention import ATTENTION_NAME, attend_by_layout
from areal_flow.policy.models.huggingface import AttentionInterface
from areal_flow.policy.models.policy import layers_of
from areal_flow.training import head
from areal_flow.training.settings import TrainerSettings

BACKEND = "inductor"
"""Of torch.compile."""

RESERVED_BYTES = 2**30
"""GPU memory of a process beside tensors: CUDA's context, buffers of NCCL, workspaces."""

DEVICE_ERRORS = ("CUDA error", "CUDA out of memory", "cuDNN error", "Triton Error [CUDA]")
"""In messages of GPU libraries that raise a plain `RuntimeError`."""

ATTENTION = frozenset(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._flash_attention_forward.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "torch_attn._varlen_attn.default",
    }
)
"""As torch's operators are called. FlexAttention is compiled, and computed again."""

PRODUCTS = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._grouped_mm.default",
        "mkldnn._linear_pointwise.default",
    }
)


def set_precision(settings: TrainerSettings) -> None:
    """Set, for the whole process, how products and sums are computed.

    A step depends on its recipe alone, so earlier settings are undone.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.dtype == "tf32"
    head.compile_kernels(compiles_layers(settings))
    deterministic = settings.kernels == "deterministic"
    if deterministic:
        # Read by cuBLAS when it is first used; it says which sums it splits among streams.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # loads torch's compiler
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def bound_memory(share: float) -> None:
    """Limit this process to its share of a GPU's memory, `RESERVED_BYTES` included."""
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, share - RESERVED_BYTES / total))


def is_device_error(error: BaseException) -> bool:
    """Return whether a GPU is full, or failed: CUDA then refuses this process all work."""
    if isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)):
        return True
    return any(message in str(error) for message in DEVICE_ERRORS)


def compiles_layers(settings: TrainerSettings) -> bool:
    return settings.kernels == "compiled" and torch.device(settings.device).type == "cuda"


def prepare_layers(model: Any, settings: TrainerSettings) -> None:
    """Compile each layer's forward, and have it keep what `trainer.activations` says.

    All layers share what is compiled, for rows of any length. Attention is left out: it has
    kernels of its own, and its layout is another object for each row. Activations are chosen
    without transformers' own switch, which asks for training mode.
    """
    compiled, copies = compiles_layers(settings), WeakValueDictionary[Any, MainMemoryCopy]()
    if compiled:
        AttentionInterface.register(ATTENTION_NAME, _uncompiled_attention())
    if settings.dtype == "bfloat16":
        model.get_input_embeddings().register_forward_hook(_to_bfloat16)
    for index, layer in enumerate(layers_of(model)):
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)
        if settings.activations == "offload":
            layer.forward = partial(_offloaded, layer, layer.forward, copies)
        elif kept := _kept_operators(settings, index, compiled=compiled):
            contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
            layer.forward = partial(_recomputed, layer.forward, contexts)


def _to_bfloat16(module: Any, inputs: Any, hidden: Tensor) -> Tensor:
    """Make the sums of layers, and with them rotary positions, bfloat16, as engines have them.

    Autocast converts the operands of products alone.
    """
    return hidden.to(torch.bfloat16)


def _kept_operators(settings: TrainerSettings, index: int, *, compiled: bool) -> frozenset[str]:
    """Return the operators whose results a layer keeps; none: it keeps all that it computes."""
    share = settings.recomputed_layers
    is_recomputed = int((index + 1) * share) > int(index * share)  # spread evenly
    if settings.activations == "recompute" and is_recomputed:
        return ATTENTION
    is_selective = settings.activations in ("selective", "recompute") and not compiled
    return ATTENTION | PRODUCTS if is_selective else frozenset()


@cache
def _uncompiled_attention() -> Any:
    return torch.compiler.disable(attend_by_layout)  # type: ignore[no-untyped-call]


class MainMemoryCopy:
    """A tensor in main memory, copied without waiting for the GPU.

    Looked up in this module at each call, so that the memory planner can replace it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._restored: Callable[[], Tensor | None] = lambda: None

    def restored(self) -> Tensor:
        """Return the tensor on its device: one copy for as long as it is referenced."""
        tensor = self._restored()
        if tensor is None:
            tensor = self._copy.to(self._device, non_blocking=True, copy=True)
            self._restored = ref(tensor)
        return tensor


def _offloaded(
    layer: Any,
    forward: Callable[..., Any],
    copies: WeakValueDictionary[Any, MainMemoryCopy],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a layer; what it keeps goes to main memory, each tensor once, but for its weights.

    Args:
        copies: of all layers, which have some tensors in common.
    """
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
        return forward(*args, **kwargs)


def _storage(tensor: Tensor) -> Any:
    """Return an identity of a tensor's memory; an address may be used again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _unpacked(kept: Tensor | MainMemoryCopy) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.restored()


def _recomputed(forward: Callable[..., Any], contexts: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # where selected results would be kept for nothing
        return forward(*args, **kwargs)
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(forward, *args, **options, **kwargs)


def _policy(
    kept: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    is_kept = str(operator) in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
