"""vLLM's CPU build with real weights, beside the torch engine; `nox -s tests_vllm` runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_flow.policy.models.policy import load_policy
from areal_flow.rollout.engines.protocol import EngineCore
from areal_flow.rollout.engines.torch_engine import TorchEngine
from tests.real_model.served import (
    Weights,
    check_rounding,
    real_requests,
    serve,
    settings_for,
    tokens_per_s,
    versions_for,
)


def vllm_engine(model: Path, dtype: str, weights: Weights) -> EngineCore:
    from areal_flow.rollout.engines.vllm.core import InProcessCore, engine_config
    from areal_flow.rollout.engines.vllm.engine import VLLMEngine
    from areal_flow.rollout.engines.vllm.weights import ServedTensors, check_logprobs

    settings = settings_for(dtype, engine="vllm", kv_cache_tokens=8192)
    core = InProcessCore(engine_config(model, settings))
    engine = VLLMEngine(core, ServedTensors(model), settings, weights, version=0)
    check_logprobs(engine, model, weights, settings)
    return engine


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllm_rounds_as_transformers_does_through_new_weights(
    model: Path, dtype: str, figure: Callable[[str, str, object], None]
) -> None:
    versions = versions_for(model, dtype)
    engine = vllm_engine(model, dtype, versions[0])
    served = serve(engine, real_requests(model), versions[1])
    torch_engine = TorchEngine(load_policy(model, dtype=dtype), settings_for(dtype), version=0)
    for name, speed in tokens_per_s(model, vllm=engine, torch=torch_engine).items():
        figure(f"{name} engine", f"tokens/s, {dtype}, one thread", speed)
    del engine, torch_engine
    gc.collect()  # before the references take their memory
    for who, gap in check_rounding(model, versions, dtype, served, times=3).items():
        name = who.replace("engine", "vllm engine")
        figure(name, f"gap of log-probabilities, {dtype}, 99% quantile in nats", float(gap))
