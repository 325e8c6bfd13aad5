"""Runs a flow in virtual time with the project's own controller; used by two experiments."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from areal_flow.config import Recipe
from areal_flow.config.cluster import ClusterSettings
from areal_flow.config.recipe import ControllerSettings
from areal_flow.planning.costs import Costs, Lengths, assumed_lengths
from areal_flow.planning.simulator import Simulated, simulate
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.training.settings import TrainerSettings

MEAN_TOKENS, CUT = 8_000, 65_536
MAX_ROWS = 64
TRAIN_TOKENS_PER_S = 25_000.0
"""Of a trainer's GPU; as the other costs below, assumed for a policy of 1.5B parameters."""


def simulated(
    chosen: Any,
    *,
    num_generators: int,
    num_trainers: int,
    eta: int,
    seed: int,
    sigma: float,
    schedule: Literal["async", "sync"] = "async",
) -> Simulated:
    """Simulate `steps` steps; the first `skip` are not measured."""
    recipe = Recipe(
        num_steps=chosen.steps,
        seed=seed,
        schedule=schedule,
        controller=ControllerSettings(batch_size=256, group_size=8, max_staleness=eta),
        generation=GenerationSettings(
            max_new_tokens=CUT, max_model_len=CUT + 1024, max_num_seqs=MAX_ROWS
        ),
        trainer=TrainerSettings(tokens_per_micro_batch=CUT + 1024),
        cluster=ClusterSettings(num_generators=num_generators),
    )
    costs = Costs(
        decode_step_s=5e-3,
        row_s=8e-5,
        cached_token_s=0.0,
        prefill_token_s=1e-5,
        max_rows=MAX_ROWS,
        train_token_s=1 / TRAIN_TOKENS_PER_S / num_trainers,
        train_pair_s=0.0,
        publish_s=0.0,
        load_s=0.0,
    )
    return simulate(recipe, costs, _lengths(sigma), num_skipped=chosen.skip)


@cache
def _lengths(sigma: float) -> Lengths:
    return assumed_lengths(CUT, mean=MEAN_TOKENS, sigma=sigma, prompt_tokens=0.0, group_share=0.0)
