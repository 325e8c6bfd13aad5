"""Low-rank adapters of policies (LoRA; Hu et al., arXiv 2106.09685). The only importer of `peft`.

A policy with an adapter computes W + (alpha / rank) B A for each chosen matrix W, and only A and B
are trained. It is evaluated and exported with that sum as a plain matrix, and served with it or as
A and (alpha / rank) B, to an engine that has W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_flow.core.errors import ConfigError
from areal_flow.policy.settings import LoraSettings

PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors in files of `peft`."""
_NAME = "default"

Named = TypeVar("Named")


def add_adapter(policy: Any, settings: LoraSettings, *, seed: int = 0) -> None:
    """Add an adapter, which changes no output yet, to a policy in place, and freeze the rest."""
    import torch.distributed.tensor  # used by `peft`, which does not import it
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_peft_config(settings), policy, adapter_name=_NAME)
        except ValueError as error:
            raise ConfigError(
                f"trainer.lora.target_modules = {settings.target_modules!r}: {error}"
            ) from error


def drawn_adapter(policy: Any, settings: LoraSettings, *, seed: int) -> dict[str, Tensor]:
    """Return an adapter's tensors as `add_adapter` draws them, by stored name.

    The policy must be on the meta device without an adapter, and cannot be used afterwards.
    """
    for module in policy.modules():
        for name, weight in module.named_parameters(recurse=False):
            # An adapter is drawn on the device of its matrix, whose memory is one number here.
            expanded = torch.empty(1).expand(weight.shape)
            setattr(module, name, torch.nn.Parameter(expanded, requires_grad=False))
    add_adapter(policy, settings, seed=seed)
    return {stored_name(n): t.detach() for n, t in policy.named_parameters() if ".lora_" in n}


def stored_name(name: str) -> str:
    """Return a tensor's name in files: `peft`'s for an adapter, without its changes for others."""
    if ".lora_" in name:
        return PREFIX + name.replace(f".{_NAME}.", ".")
    return name.replace(".base_layer.", ".")


def split_adapter(tensors: Mapping[str, Named]) -> tuple[dict[str, Named], dict[str, Named]]:
    adapter = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    return {name: tensors[name] for name in tensors if name not in adapter}, adapter


def merge_adapter(policy: Any, tensors: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Return a function that adds to a matrix its adapter, read from `tensors` by `stored_name`.

    Other tensors are returned as they are.
    """
    if not any(name.startswith(PREFIX) for name in tensors):
        return lambda name, weight: weight
    from peft.utils import transpose

    layers = _layers(policy)

    @torch.no_grad()
    def merge(name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in layers:
            return weight
        down, up = (tensors[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        layer = layers[module]
        delta = transpose(up @ down, layer.fan_in_fan_out) * layer.scaling[_NAME]
        merged: Tensor = weight + delta.to(weight.device)
        return merged

    return merge


def scale_adapter(policy: Any) -> Callable[[str, Tensor], Tensor]:
    """Return a function that scales an adapter's B, by `stored_name`, so that B A is added to W."""
    layers = _layers(policy)

    def scale(name: str, tensor: Tensor) -> Tensor:
        module, _, side = name.removeprefix(PREFIX).rpartition(".lora_")
        return tensor * layers[module].scaling[_NAME] if side[0] == "B" else tensor

    return scale


def merge_scaled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return plain weights of a base and an adapter that `scale_adapter` has scaled."""
    merged, adapter = split_adapter(tensors)
    for name, down in adapter.items():
        module, _, side = name.removeprefix(PREFIX).rpartition(".lora_")
        if side[0] == "A":
            up = adapter[f"{PREFIX}{module}.lora_B.weight"]
            matrix = merged[f"{module}.weight"]
            merged[f"{module}.weight"] = matrix + (up.float() @ down.float()).to(matrix.dtype)
    return merged


def adapter_rank(tensors: Mapping[str, Tensor]) -> int:
    """Return the rank of the adapter among these tensors; 0 if there is none."""
    downs = (each for name, each in tensors.items() if name.endswith(".lora_A.weight"))
    return next((len(down) for down in downs), 0)


@contextmanager
def without_adapter(policy: Any) -> Iterator[None]:
    layers = _layers(policy).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_description(settings: LoraSettings, *, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`, which `peft` needs to load an adapter."""
    return {
        **_peft_config(settings).to_dict(),
        "base_model_name_or_path": base,
        "inference_mode": True,
    }


def _peft_config(settings: LoraSettings) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=settings.modules,
        task_type="CAUSAL_LM",
    )


def _layers(policy: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in policy.named_modules() if isinstance(layer, LoraLayer)}
