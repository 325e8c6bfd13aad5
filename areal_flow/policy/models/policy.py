"""Loads policies, runs them over packed rows, and names their weights.

Letters: T packed tokens, M chosen positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from areal_flow.algorithms.gather import GatherIndex, deterministic_gather
from areal_flow.core.errors import ModelError, WeightsError
from areal_flow.policy.checkpoints import ADAPTER_FILE, weight_files
from areal_flow.policy.models.attention import ATTENTION_NAME, AttentionLayout, RowLayout
from areal_flow.policy.models.huggingface import (
    AutoConfig,
    AutoModelForCausalLM,
    GradientCheckpointingLayer,
    without_progress_bars,
)
from areal_flow.policy.models.linear import swap_linear_layers
from areal_flow.policy.models.lora import add_adapter, merge_adapter, split_adapter, stored_name
from areal_flow.policy.models.settings import LoraSettings

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(directory: Path | str, *, dtype: str = "float32") -> Any:
    """Load a causal language model from a directory, in evaluation mode.

    Any stored type becomes `dtype`: a trainer's master weights are float32. The adapter of a
    checkpoint that has one is merged.
    """
    if (Path(directory) / ADAPTER_FILE).is_file():
        return _load_merged(Path(directory), dtype=dtype)
    try:
        with without_progress_bars():
            policy, loading_info = AutoModelForCausalLM.from_pretrained(
                str(directory),
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"expected a Hugging Face model directory with config.json and safetensors, "
            f"found {directory}: {error}"
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"{directory} lacks {len(missing)} of the model's tensors, which would be drawn at "
            f"random: {', '.join(missing[:4])}. Save the whole model with save_pretrained"
        )
    return disable_dropout_and_move(policy, "cpu")


def _load_merged(directory: Path, *, dtype: str) -> Any:
    try:
        with_adapter = empty_policy(directory, device="meta")
        with torch.device("meta"):
            add_adapter(with_adapter, read_lora_settings(directory))
        files = [load_file(file) for file in weight_files(directory)]
        tensors = {name: tensor for file in files for name, tensor in file.items()}
        assign_tensors(with_adapter, tensors)
    except (OSError, ValueError, SafetensorError, WeightsError) as error:
        raise ModelError(
            f"expected a checkpoint's {ADAPTER_FILE} and, in it or in that of step 0 beside it, "
            f"the model.safetensors that it belongs to, found {directory}: {error}"
        ) from error
    merge, (plain, _) = merge_adapter(with_adapter, tensors), split_adapter(tensors)
    merged = {name: merge(name, tensor) for name, tensor in plain.items()}
    return policy_with(directory, merged, dtype=dtype)


def check_adapter(directory: Path, settings: LoraSettings) -> None:
    with torch.device("meta"):
        add_adapter(empty_policy(directory, device="meta"), settings)


def read_lora_settings(directory: Path) -> LoraSettings:
    with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
        return LoraSettings.model_validate_json((file.metadata() or {}).get("lora", ""))


def empty_policy(
    directory: Path | str, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Any:
    """Build the architecture that a directory's config.json describes; weights come later."""
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    return policy_from_config(config, dtype=dtype, device=device)


def policy_from_config(
    config: Any, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Any:
    """Build an architecture, with random weights; on the meta device without any.

    Weights are drawn on the CPU, so that a seed gives the same ones on every device.
    """
    with torch.device("meta") if str(device) == "meta" else nullcontext():
        policy = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME
        )
    return disable_dropout_and_move(policy, device)


def disable_dropout_and_move(policy: Any, device: torch.device | str) -> Any:
    """Switch off what is random: a step's numbers must be those of its tokens, replayed.

    Policies are trained in evaluation mode too: in training mode layers drop values, and mixtures
    of experts may add noise to their router's input.
    """
    swap_linear_layers(policy)
    return policy.to(device).eval()


def layers_of(policy: Any) -> list[Any]:
    return [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]


def fill_buffers(policy: Any) -> None:
    """Compute what a policy has beside its weights, such as frequencies of its positions.

    Weights of the modules that have any are drawn at random by the way: they are loaded later.
    """
    for module in policy.modules():
        if module._non_persistent_buffers_set:
            policy._init_weights(module)


def logits_at(policy: Any, input_ids_1T: Tensor, layout: RowLayout, positions_M: Tensor) -> Tensor:
    """Return the logits `[M, V]` of a packed row at some of its positions."""
    return run_policy(policy, input_ids_1T, layout, positions_M)[0]


def hidden_at(policy: Any, input_ids_1T: Tensor, layout: RowLayout, positions_M: Tensor) -> Tensor:
    """Return what `logits_of` makes logits of, at some positions of a packed row: `[M, H]`."""
    hidden_1TH = policy.get_decoder()(
        input_ids=input_ids_1T, position_ids=layout.position_ids, use_cache=False, layout=layout
    ).last_hidden_state
    hidden_TH: Tensor = hidden_1TH[0]
    return deterministic_gather(hidden_TH, GatherIndex.of(positions_M, len(hidden_TH)))


def run_policy(
    policy: Any, input_ids: Tensor, layout: AttentionLayout, kept: Tensor | int
) -> Tensor:
    """Return a policy's logits at the positions that are kept: some of a row, or the last ones."""
    logits: Tensor = policy(
        input_ids=input_ids,
        position_ids=layout.position_ids,
        use_cache=False,
        layout=layout,
        logits_to_keep=kept,
    ).logits
    return logits


def policy_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the policy's weights by name, detached; a tied tensor once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # not its address: tensors on the meta device and empty ones have 0
            continue
        seen.add(id(tensor))
        tensors[stored_name(name)] = tensor.detach()
    return tensors


@torch.no_grad()
def assign_tensors(policy: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the policy, in place; after an error it must not be used.

    A policy on the meta device takes no values: names and shapes are compared.
    """
    copy_by_name(policy_tensors(policy), tensors, tensors.__getitem__)


@torch.no_grad()
def policy_with(directory: Path | str, tensors: Mapping[str, Tensor], *, dtype: str) -> Any:
    """Return a directory's policy whose weights are these tensors, not copies of them.

    Nothing is drawn at random, and only a tensor of another type than the policy's is converted.

    Raises:
        WeightsError: names or shapes are others.
    """
    policy = empty_policy(directory, dtype=dtype, device="meta")
    targets = policy_tensors(policy)
    assign_tensors(policy, tensors)
    for module in policy.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    fill_buffers(policy)  # first: it would draw over the weights
    own = {name: tensor.to(targets[name].dtype) for name, tensor in tensors.items()}
    policy.load_state_dict(own, strict=False, assign=True)
    policy.tie_weights()
    return policy


@torch.no_grad()
def copy_by_name(
    targets: Mapping[str, Tensor], given: Mapping[str, object], read: Callable[[str], Tensor]
) -> None:
    """Copy what is read of each name that is given, one at a time, into the tensor of that name.

    Raises:
        WeightsError: names or shapes are others.
    """
    if targets.keys() != given.keys():
        odd = sorted(targets.keys() ^ given.keys())
        raise WeightsError(
            f"expected the policy's {len(targets)} tensors, found {len(given)}; "
            f"not in both: {', '.join(odd[:4])}"
        )
    for name, target in targets.items():
        tensor = read(name)
        if target.shape != tensor.shape:
            raise WeightsError(
                f"{name}: expected shape {tuple(target.shape)}, found {tuple(tensor.shape)}"
            )
        target.copy_(tensor)
