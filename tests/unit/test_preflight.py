"""Devices are compared with what the machine has, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from areal_flow.config import build_recipe
from areal_flow.errors import ConfigError
from pipelines.preflight import check_devices

BOTH = {"trainer": {"device": "cuda"}, "generation": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("table", "num_gpus", "said"),
    [
        (BOTH, 0, "trainer.device = 'cuda' and generation.device = 'cuda': expected CUDA, found"),
        ({"generation": {"device": "cuda"}, "cluster": {"num_gpus": 4}}, 0, "set device to 'cpu'"),
        ({**BOTH, "cluster": {"num_gpus": 4}}, 1, "for each of 2 trainers and generators"),
        (
            {"trainer": {"device": "cuda", "dtype": "bfloat16"}, "cluster": {"num_gpus": 1}},
            1,
            "trainer.dtype = 'bfloat16': Old GPU cannot compute in it; set it to 'float32'",
        ),
        ({"trainer": {"device": "cuda:1"}}, 1, "trainer.device = 'cuda:1': expected 'cpu' or"),
    ],
)
def test_what_this_machine_lacks_is_refused(
    table: dict[str, Any], num_gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"torch": "2.0", "num_gpus": num_gpus, "without_bfloat16": ["Old GPU"] * num_gpus}
    monkeypatch.setattr("pipelines.preflight._cuda_found", lambda: found)
    with pytest.raises(ConfigError) as raised:
        check_devices(build_recipe(table, source="test"))
    assert said in str(raised.value)


def test_what_this_machine_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.0", "num_gpus": 2, "without_bfloat16": []}
    monkeypatch.setattr("pipelines.preflight._cuda_found", lambda: found)
    bfloat16 = {name: {**settings, "dtype": "bfloat16"} for name, settings in BOTH.items()}
    check_devices(build_recipe({**bfloat16, "cluster": {"num_gpus": 2}}, source="test"))


def test_recipe_without_gpus_asks_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pipelines.preflight._cuda_found")
    check_devices(build_recipe({"trainer": {"dtype": "bfloat16"}}, source="test"))
