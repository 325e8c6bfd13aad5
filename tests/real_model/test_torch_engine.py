"""The torch engine with real weights: what transformers computes, through weights in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal_flow.policy.models.policy import load_policy
from areal_flow.rollout.engines.torch_engine import TorchEngine
from tests.real_model.served import (
    check_rounding,
    real_requests,
    serve,
    settings_for,
    tokens_per_s,
    versions_for,
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engine_rounds_as_transformers_does_through_new_weights(
    model: Path, dtype: str, figure: Callable[[str, str, object], None]
) -> None:
    engine = TorchEngine(load_policy(model, dtype=dtype), settings_for(dtype), version=0)
    (speed,) = tokens_per_s(model, torch=engine).values()
    figure("torch engine", f"tokens/s, {dtype}, one thread", speed)
    versions = versions_for(model, dtype)
    served = serve(engine, real_requests(model), versions[1])
    del engine  # before the references take their memory
    for who, gap in check_rounding(model, versions, dtype, served, times=1.5).items():
        name = who.replace("engine", "torch engine")
        figure(name, f"gap of log-probabilities, {dtype}, 99% quantile in nats", float(gap))
