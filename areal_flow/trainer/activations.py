"""What layers keep for the backward pass: all that it needs, a part, or nothing but their input.

`selective` keeps what products and attention returned, and computes norms, rotations and
activation functions again. Layers that are compiled do so by themselves: torch's compiler computes
again what costs less than to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from areal_flow.config import TrainerSettings
from areal_flow.models.policy import layers_of
from areal_flow.trainer.kernels import compiles_layers

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
    contexts: Any
    if settings.activations == "recompute":
        contexts = noop_context_fn
    elif settings.activations == "selective" and not compiles_layers(settings):
        contexts = partial(create_selective_checkpoint_contexts, _policy)
    else:
        return
    for layer in layers_of(model):
        layer.forward = partial(_recomputed, layer.forward, contexts)


def offloaded(settings: TrainerSettings) -> AbstractContextManager[object]:
    """Have what a pass keeps go to main memory; on a GPU nobody waits for the copies.

    Called by the module's name: who plans a GPU's memory on a CPU replaces it.
    """
    if settings.activations != "offload":
        return nullcontext()
    on_gpu = torch.device(settings.device).type == "cuda"
    return torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)


def _recomputed(forward: Callable[..., Any], contexts: Any, *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():  # where selected results would be kept for nothing
        return forward(*given, **named)
    how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(forward, *given, **how, **named)


def _policy(context: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    kept = str(operator) in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
