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
    BaseModelOutputWithPast,
    GradientCheckpointingLayer,
    without_progress_bars,
)
from areal_flow.policy.models.linear import swap_linear_layers
from areal_flow.policy.models.lora import add_adapter, merge_adapter, split_adapter, stored_name
from areal_flow.policy.settings import LoraSettings

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(directory: Path | str, *, dtype: str = "float32") -> Any:
    """Load a causal language model from a directory, in evaluation mode.

    Weights are converted to `dtype`: a trainer's master weights are float32. A checkpoint's adapter
    is merged into them.
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
        tensors: dict[str, Tensor] = {}
        for file in weight_files(directory):
            tensors |= load_file(file)
        assign_tensors(with_adapter, tensors)
    except (OSError, ValueError, SafetensorError, WeightsError) as error:
        raise ModelError(
            f"expected a checkpoint's {ADAPTER_FILE} and, in it or in that of step 0 beside it, "
            f"the model.safetensors that it belongs to, found {directory}: {error}"
        ) from error
    merge, (base, _) = merge_adapter(with_adapter, tensors), split_adapter(tensors)
    merged = {name: merge(name, tensor) for name, tensor in base.items()}
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
    """Build an architecture with random weights, or without weights on the meta device.

    Weights are drawn on the CPU, so that a seed gives the same ones on every device.
    """
    with torch.device("meta") if str(device) == "meta" else nullcontext():
        policy = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME
        )
    return disable_dropout_and_move(policy, device)


def disable_dropout_and_move(policy: Any, device: torch.device | str) -> Any:
    """Switch off what is random: a replayed step must compute the same numbers.

    Policies are trained in evaluation mode too: in training mode layers drop values, and mixtures
    of experts may add noise to their router's input.
    """
    swap_linear_layers(policy)
    return policy.to(device).eval()


def layers_of(policy: Any) -> list[Any]:
    return [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]


def fill_buffers(policy: Any) -> None:
    """Compute a policy's buffers, such as the frequencies of its positions.

    This also draws new weights for the modules that have buffers: load weights afterwards.
    """
    for module in policy.modules():
        if module._non_persistent_buffers_set:
            policy._init_weights(module)


# Forward passes


def run_policy(
    policy: Any, input_ids: Tensor, layout: AttentionLayout, logits_to_keep: Tensor | int
) -> Tensor:
    """Return a policy's logits at some positions of a row, or at its last ones."""
    logits: Tensor = policy(
        input_ids=input_ids,
        position_ids=layout.position_ids,
        use_cache=False,
        layout=layout,
        logits_to_keep=logits_to_keep,
    ).logits
    return logits


def logits_at(policy: Any, input_ids_1T: Tensor, layout: RowLayout, positions_M: Tensor) -> Tensor:
    """Return the logits `[M, V]` of a packed row at some of its positions."""
    return run_policy(policy, input_ids_1T, layout, positions_M)[0]


def hidden_at(policy: Any, input_ids_1T: Tensor, layout: RowLayout, positions_M: Tensor) -> Tensor:
    """Return last hidden states `[M, H]` at some positions of a packed row, for `logits_of`."""
    hidden_1TH = policy.get_decoder()(
        input_ids=input_ids_1T, position_ids=layout.position_ids, use_cache=False, layout=layout
    ).last_hidden_state
    hidden_TH: Tensor = hidden_1TH[0]
    return deterministic_gather(hidden_TH, GatherIndex.of(positions_M, len(hidden_TH)))


def logits_of(policy: Any, hidden_MH: Tensor) -> Tensor:
    """Return logits `[M, V]` of last hidden states, in the type of the master weights."""
    return _logits_of(policy, hidden_MH.to(policy.dtype), {})


def logits_of_products(policy: Any, products_MV: Tensor) -> Tensor:
    """Return logits of products of hidden states with `linear_head`: scaled and capped."""
    head = policy.get_output_embeddings()
    return _logits_of(policy, products_MV, {head: _stub(head, lambda products: products)})


def linear_head(policy: Any) -> nn.Linear | None:
    """Return the layer that multiplies last hidden states, if there is a plain one."""
    head = policy.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    hidden_1H = head.weight.new_zeros(1, head.in_features)
    inputs: list[Tensor] = []

    def record_input(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return hidden.new_zeros(*hidden.shape[:-1], head.out_features)

    _logits_of(policy, hidden_1H, {head: _stub(head, record_input)})
    storages = {each.untyped_storage()._cdata for each in (hidden_1H, *inputs)}
    return head if inputs and len(storages) == 1 else None


def _logits_of(
    policy: Any, hidden_MH: Tensor, replacements: Mapping[nn.Module, nn.Module]
) -> Tensor:
    """Return the logits that a policy's own forward computes of hidden states, without its layers.

    So logit scaling and final soft-caps stay in. Modules are replaced in a copy of the policy.
    """
    layers, output = policy.get_decoder(), _PrecomputedHidden(last_hidden_state=hidden_MH[None])
    copied = _replace(policy, {layers: _stub(layers, lambda *_, **__: output), **replacements})
    with torch.autocast(hidden_MH.device.type, enabled=False):
        return copied.forward().logits.flatten(0, 1)  # type: ignore[no-any-return]


def _stub(module: nn.Module, forward: Callable[..., Any]) -> Any:
    copied = _shallow_copy(module)
    copied.forward = forward
    return copied


def _replace(module: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> Any:
    copied = _shallow_copy(module)
    copied._modules = {
        name: child and (replacements.get(child) or _replace(child, replacements))
        for name, child in module._modules.items()
    }
    return copied


def _shallow_copy(module: nn.Module) -> Any:
    """Return a module with the same content; `copy.copy` would set up those of FSDP anew."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


class _PrecomputedHidden(BaseModelOutputWithPast):
    """The output of a policy's layers, as far as logits need it."""

    def __getattr__(self, name: str) -> None:
        """Return None for the further outputs of mixtures of experts."""


# Weights


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

    On the meta device this only compares names and shapes.
    """
    copy_by_name(policy_tensors(policy), tensors, tensors.__getitem__)


@torch.no_grad()
def policy_with(directory: Path | str, tensors: Mapping[str, Tensor], *, dtype: str) -> Any:
    """Return a directory's policy with these tensors as its weights, not with copies of them.

    Nothing is drawn at random, and only tensors of another type are converted.

    Raises:
        WeightsError: names or shapes differ.
    """
    policy = empty_policy(directory, dtype=dtype, device="meta")
    targets = policy_tensors(policy)
    assign_tensors(policy, tensors)
    for module in policy.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    fill_buffers(policy)  # first: it would draw over the weights
    weights = {name: tensor.to(targets[name].dtype) for name, tensor in tensors.items()}
    policy.load_state_dict(weights, strict=False, assign=True)
    policy.tie_weights()
    return policy


@torch.no_grad()
def copy_by_name(
    targets: Mapping[str, Tensor], sources: Mapping[str, object], read: Callable[[str], Tensor]
) -> None:
    """Read each of the sources, one at a time, and copy it into the target of its name.

    Raises:
        WeightsError: names or shapes differ.
    """
    if targets.keys() != sources.keys():
        unmatched = sorted(targets.keys() ^ sources.keys())
        raise WeightsError(
            f"expected the policy's {len(targets)} tensors, found {len(sources)}; "
            f"not in both: {', '.join(unmatched[:4])}"
        )
    for name, target in targets.items():
        tensor = read(name)
        if target.shape != tensor.shape:
            raise WeightsError(
                f"{name}: expected shape {tuple(target.shape)}, found {tuple(tensor.shape)}"
            )
        target.copy_(tensor)
