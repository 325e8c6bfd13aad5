"""Memory of many layers, of which few are traced."""

from __future__ import annotations

from typing import Any

import pytest

from areal_flow.models.huggingface import AutoConfig
from areal_flow.planning import depth, memory
from areal_flow.planning.memory import trainer_memory
from areal_flow.trainer import linear_logprobs
from tests.unit.test_memory_plan import SHAPE, config, recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_trainers", "changed"),
    [
        (1, {}),
        (2, {"activations": "recompute", "algorithm": {"kl_coefficient": 0.1}}),
    ],
    ids=["one", "ranks"],
)
def test_few_layers_and_chunks_tell_what_all_take_to_the_byte(
    num_trainers: int, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "CHUNK_NUMBERS", 64 * SHAPE["vocab_size"])
    on_gpu = {"device": "cuda", "dtype": "bfloat16"}
    chosen, shape = recipe(num_trainers, **on_gpu, **changed), config(num_layers=6)
    told = trainer_memory(chosen, shape)
    monkeypatch.setattr(depth, "MORE", 6)
    monkeypatch.setattr(memory, "_first_and_last", lambda chunks: chunks)
    assert told == trainer_memory(chosen, shape)


def test_peak_of_many_layers_may_be_elsewhere_than_that_of_few() -> None:
    """And layers that differ, or traces that do, are traced whole."""
    traced: list[int] = []

    def trace(shape: Any) -> depth.StepTrace:
        num = shape.num_hidden_layers
        traced.append(num)
        at_head, at_layers = {"activations": 1000 + num}, {"activations": 10 + 100 * num}
        places = {("forward", -1, 0, False): at_head, ("backward", 0, 0, False): at_layers}
        if shape.hidden_act == "relu" and num == depth.MORE:
            places[("forward", -1, 1, False)] = at_head
        return depth.StepTrace({"activations": max(1000 + num, 10 + 100 * num)}, {}, places)

    assert depth.trace_of(config(num_layers=40), trace).peak == {"activations": 4010}
    assert traced == [depth.FEW, depth.MORE]
    windows = ["sliding_attention", "full_attention"] * 20
    mixed = AutoConfig.for_model("qwen2", **{**SHAPE, "num_hidden_layers": 40}, layer_types=windows)
    other = AutoConfig.for_model("qwen2", **{**SHAPE, "num_hidden_layers": 40}, hidden_act="relu")
    for shape in (mixed, other, config(num_layers=depth.MORE)):
        found = depth.trace_of(shape, trace)
        assert traced.pop() == shape.num_hidden_layers
        assert found == trace(shape)
