"""Packing: trained tokens per second with packing by length, and with a fixed number.

Both ways compute the gradient of the same trajectories, and no micro-batch may hold more tokens
than the budget, which stands for memory. The paper's Algorithm 1 packs by lengths. The other way
takes as many trajectories a micro-batch, in the order in which they came: the largest number of
which no micro-batch of the batch exceeds the budget. A seed draws the lengths; the ways take turns
on it, and the better of two rounds counts. Time is the processor's, so that other work on the
machine does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import process_time
from typing import Any

import numpy as np
import torch

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.algorithms.protocol import MinibatchSize
from areal_flow.algorithms.registry import PPO
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.ranked_model import Minibatch
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import update_policy
from benchmarks import harness
from benchmarks.plots import draw_bars
from benchmarks.science.findings import Estimate, Finding, conclude
from benchmarks.shapes import random_trajectory
from benchmarks.tailed_load import MODELS, PROMPT_TOKENS, Lengths

PROFILES = {
    "sigma 0.6": Lengths(median=150, sigma=0.6, cut=2048),
    "sigma 1.0": Lengths(median=110, sigma=1.0, cut=2048),
    "sigma 1.5": Lengths(median=66, sigma=1.5, cut=2048),
}
"""Lognormal lengths of completions, some 180 tokens in the mean."""
BUDGET = 2560
OPTIONS = {"seeds": [0, 1, 2], "sequences": 64, "rounds": 2}
QUICK = {"seeds": [0, 1], "sequences": 24, "rounds": 1}
PACKED, FIXED = "by lengths", "fixed number"
SPEED = "tokens_per_processor_s"


def fixed_number(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches with the largest fixed number of sequences that fits the budget."""
    for number in range(len(lengths), 0, -1):
        starts = range(0, len(lengths), number)
        packed = [[*range(i, min(i + number, len(lengths)))] for i in starts]
        if all(sum(lengths[i] for i in micro) <= max_tokens for micro in packed):
            return packed
    raise ValueError(f"a sequence is longer than {max_tokens} tokens")


def compare(profile: str, seed: int, chosen: Any) -> dict[str, dict[str, float]]:
    """Return speed, fill and number of micro-batches of each way."""
    config, drawn = MODELS["0.6M"], np.random.default_rng(seed)
    sequences = [
        random_trajectory(PROMPT_TOKENS, length, config.vocab_size, seed=seed)
        for length in PROFILES[profile].draw(drawn, (chosen.sequences,)).tolist()
    ]
    lengths = [each.num_tokens for each in sequences]
    plans = {
        PACKED: pack_first_fit_decreasing(lengths, max_tokens=BUDGET),
        FIXED: fixed_number(lengths, BUDGET),
    }
    torch.manual_seed(seed)
    backend = TrainerBackend(policy_from_config(config), TrainerSettings(learning_rate=1e-9))
    settings = StepSettings(PPO(), temperature=1.0, seed=seed)
    size = MinibatchSize(sum(each.num_trained for each in sequences), len(sequences))

    def update(plan: list[list[int]]) -> float:
        batches = backend.trained.batches(sequences, [plan])
        minibatch = Minibatch(batches, size, 1e-9, settings)
        began = process_time()
        update_policy(backend, minibatch)
        return process_time() - began

    ways = {way: partial(update, plan) for way, plan in plans.items()}
    turns = harness.take_turns(chosen.rounds, ways)
    return {
        way: {
            SPEED: size.num_tokens / min(turns[way]),
            "fill": sum(lengths) / len(plan) / BUDGET,
            "micro_batches": len(plan),
        }
        for way, plan in plans.items()
    }


def run(chosen: Any) -> Finding:
    torch.set_num_threads(1)
    rows, ratios = [], {}
    for profile in PROFILES:
        comparisons = [compare(profile, seed, chosen) for seed in chosen.seeds]
        for way in (PACKED, FIXED):
            columns = {
                name: Estimate.of([each[way][name] for each in comparisons]).text(2)
                for name in comparisons[0][way]
            }
            rows.append({"lengths": profile, "micro-batches are": way, **columns})
        ratios[profile] = Estimate.of(
            [each[PACKED][SPEED] / each[FIXED][SPEED] for each in comparisons]
        )
    conclusions = [
        conclude(f"{profile}: speed, by lengths over fixed", of, nothing=1.0, num_decimals=2)
        for profile, of in ratios.items()
    ]
    bars = {profile: (of.mean, of.half) for profile, of in ratios.items()}
    draw = partial(
        draw_bars, bars, x="trained tokens a processor second, by lengths over fixed", none=1.0
    )
    title = f"0.6M parameters, one thread, {BUDGET:,} tokens a micro-batch at most"
    return Finding({title: rows}, conclusions, draw)
