"""Every shipped recipe for GPUs fits the GPUs named in the docs, according to the planner.

Here and not beside the planner's tests, so that `nox -s tests_slow` starts these long ones first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_flow.config import load_recipe
from areal_flow.planning.costs import model_config
from areal_flow.planning.gpus import GIB
from areal_flow.planning.memory import plan_memory, trainer_memory
from areal_flow.policy.models.policy import policy_from_config
from pipelines.jobs.job import recipe_path

GPUS_NAMED = {
    "gsm8k-1gpu": ("RTX4080-16GB", "RTX4090-24GB", "H100-80GB"),
    "gsm8k-smollm": ("A100-80GB", "H100-80GB", "H200-141GB"),
    "deepscaler": ("A100-80GB", "H100-80GB"),
    "deepcoder": ("A100-80GB", "H100-80GB"),
    "deepscaler-7b": ("A100-80GB", "H100-80GB"),
    "deepscaler-32b": ("A100-80GB", "H100-80GB"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GPUS_NAMED)
def test_every_shipped_gpu_recipe_fits_the_gpus_that_it_names(name: str) -> None:
    chosen = load_recipe(recipe_path(Path(name)))
    shape = model_config(chosen.model)
    with torch.device("meta"):
        policy = policy_from_config(shape, device="meta")
    ranks = trainer_memory(chosen, shape)
    for gpu in GPUS_NAMED[name]:
        plan = plan_memory(chosen, ranks, policy, gpu=gpu)
        assert plan.fits, (gpu, plan.trainer_bytes / GIB, ranks[0].needed_bytes / GIB)


def test_every_shipped_gpu_recipe_names_gpus_that_it_is_checked_against() -> None:
    files = recipe_path(Path("deepscaler")).parent.glob("*.toml")
    on_gpus = {file.stem: file for file in files if load_recipe(file).trainer.device == "cuda"}
    assert on_gpus.keys() == GPUS_NAMED.keys()
    for file in on_gpus.values():
        assert " GB" in file.read_text().partition("\nmodel =")[0], file.name
