"""Low-rank adapters of policies (LoRA; Hu et al., arXiv 2106.09685). The only importer of `peft`.

Of each chosen matrix W a policy with an adapter computes W + (alpha / rank) B A, of which A and B
alone are trained. Whoever serves, evaluates or exports it gets that sum as a plain matrix.
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
"""What names of an adapter's tensors begin with, as `peft` writes them."""
_NAME = "default"

Named = TypeVar("Named")


def add_adapter(policy: Any, settings: LoraSettings, *, seed: int = 0) -> None:
    """Put an adapter into a policy, in place: it computes what it did, and the rest is frozen."""
    import torch.distributed.tensor  # which `peft` reads, and does not import
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_config(settings), policy, adapter_name=_NAME)
        except ValueError as error:
            raise ConfigError(
                f"trainer.lora.target_modules = {settings.target_modules!r}: {error}"
            ) from error


def drawn_adapter(policy: Any, settings: LoraSettings, *, seed: int) -> dict[str, Tensor]:
    """Return an adapter's tensors as `add_adapter` draws them, by stored name.

    The policy, on the meta device and without an adapter, is used up.
    """
    for module in policy.modules():
        for name, weight in module.named_parameters(recurse=False):
            # What is drawn goes where the matrix is; of that, one number takes memory.
            like = torch.empty(1).expand(weight.shape)
            setattr(module, name, torch.nn.Parameter(like, requires_grad=False))
    add_adapter(policy, settings, seed=seed)
    return {stored_name(n): t.detach() for n, t in policy.named_parameters() if ".lora_" in n}


def stored_name(name: str) -> str:
    """Return what a tensor of a policy is called in files, whether or not it has an adapter.

    A frozen matrix keeps its own name, and an adapter's tensors have those of `peft`.
    """
    if ".lora_" in name:
        return PREFIX + name.replace(f".{_NAME}.", ".")
    return name.replace(".base_layer.", ".")


def split_adapter(tensors: Mapping[str, Named]) -> tuple[dict[str, Named], dict[str, Named]]:
    adapter = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    return {name: tensors[name] for name in tensors if name not in adapter}, adapter


def merge_adapter(policy: Any, tensors: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Return what makes, of a matrix that an adapter adapts, the sum that both stand for.

    Its adapter's tensors, as `tensors` has them by `stored_name`, are read by the way.
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
        down, up = (tensors[f"{PREFIX}{module}.lora_{of}.weight"] for of in "AB")
        delta = transpose(up @ down, layers[module].fan_in_fan_out) * layers[module].scaling[_NAME]
        merged: Tensor = weight + delta.to(weight.device)
        return merged

    return merge


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
    """Return the content of `adapter_config.json`, by which `peft` loads an adapter."""
    return {**_config(settings).to_dict(), "base_model_name_or_path": base, "inference_mode": True}


def _config(settings: LoraSettings) -> Any:
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
