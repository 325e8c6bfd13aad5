"""Which kernels compute a trainer's passes: compiled layers, TF32, deterministic algorithms."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from areal_flow.policy.models.attention import ATTENTION_NAME, attend_by_layout
from areal_flow.policy.models.huggingface import AttentionInterface
from areal_flow.policy.models.policy import layers_of
from areal_flow.training.settings import TrainerSettings

BACKEND = "inductor"
"""Of torch.compile."""

RESERVED_BYTES = 2**30
"""What a process takes of a GPU beside tensors: CUDA's context, buffers of NCCL, workspaces."""

DEVICE_ERRORS = ("CUDA error", "CUDA out of memory", "cuDNN error", "Triton Error [CUDA]")
"""What messages of libraries on a GPU contain, which raise a plain `RuntimeError`."""


def set_precision(settings: TrainerSettings) -> None:
    """Set what decides, for the whole process, how products and sums are computed.

    Numbers of a step must follow from its recipe, so what was set before is undone.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.dtype == "tf32"
    deterministic = settings.kernels == "deterministic"
    if deterministic:
        # Read by cuBLAS when it is first used; it says which sums it splits among streams.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # loads torch's compiler
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def bound_memory(share: float) -> None:
    """Have this process run out of memory at its share of a GPU's, `RESERVED_BYTES` included."""
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, share - RESERVED_BYTES / total))


def is_device_error(error: BaseException) -> bool:
    """Return whether a GPU failed, after which CUDA refuses a process all work, or is full."""
    if isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)):
        return True
    return any(message in str(error) for message in DEVICE_ERRORS)


def compiles_layers(settings: TrainerSettings) -> bool:
    return settings.kernels == "compiled" and torch.device(settings.device).type == "cuda"


def compile_layers(model: Any) -> None:
    """Have torch's compiler fuse what each layer computes around its attention.

    All layers share what is compiled, for rows of any length. Attention is left out: it has
    kernels of its own, and its layout is another object for each row.
    """
    AttentionInterface.register(ATTENTION_NAME, _uncompiled_attention())
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)


@cache
def _uncompiled_attention() -> Any:
    return torch.compiler.disable(attend_by_layout)  # type: ignore[no-untyped-call]
