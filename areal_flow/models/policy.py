"""A model directory in, a policy out; and a policy's weights as named tensors, both ways.

Real checkpoints and the tiny ones made here take the same path: `AutoModelForCausalLM`, safetensors
only, no remote code, our attention function.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_flow.errors import ModelError, WeightsError
from areal_flow.models.attention import ATTENTION_NAME, AttentionLayout
from areal_flow.models.huggingface import AutoConfig, AutoModelForCausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(
    directory: Path | str, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Any:
    """Load a Hugging Face causal language model from a directory, in evaluation mode.

    Any stored type becomes `dtype`: a trainer's master weights are float32.

    Raises:
        ModelError: the directory has no usable configuration or weights.
    """
    try:
        policy = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"expected a Hugging Face model directory with config.json and safetensors, "
            f"found {directory}: {error}"
        ) from error
    return policy.to(device).eval()


def empty_policy(
    directory: Path | str, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Any:
    """Build the architecture that a directory's config.json describes; weights come later."""
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    policy = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME
    )
    return policy.to(device).eval()


def logits_at(
    policy: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    positions_M: Tensor,
) -> Tensor:
    """Return the logits of a packed row at some of its positions, through the policy's own head.

    The head is called by the policy's forward alone: logit scaling and final soft-caps stay in.

    Args:
        input_ids: packed tokens `[1, T]`.
        position_ids: each token's position in its own sequence, `[1, T]`.
        layout: what each token may attend to.
        positions_M: indices into the row, `[M]`.

    Returns:
        Logits `[M, V]` in the order of `positions_M`.
    """
    output = policy(
        input_ids=input_ids,
        position_ids=position_ids,
        use_cache=False,
        layout=layout,
        logits_to_keep=positions_M,
    )
    logits_MV: Tensor = output.logits[0]
    return logits_MV


def policy_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the policy's weights by name, detached; a tied tensor once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in policy.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def assign_tensors(policy: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the policy, in place.

    Raises:
        WeightsError: names or shapes are not this policy's; the policy may be half changed and
            must not be used.
    """
    expected = policy_tensors(policy)
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())
        raise WeightsError(
            f"expected the policy's {len(expected)} tensors, found {len(tensors)}; "
            f"not in both: {', '.join(odd[:4])}"
        )
    for name, target in expected.items():
        if target.shape != tensors[name].shape:
            raise WeightsError(
                f"{name}: expected shape {tuple(target.shape)}, found {tuple(tensors[name].shape)}"
            )
        target.copy_(tensors[name])
