"""Step time of a run in closed form, for comparing many settings at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from areal_flow.config import Recipe
from areal_flow.flow.flow_setup import groups_in_flight
from areal_flow.planning.costs import Costs
from areal_flow.planning.lengths import Lengths

ROUNDS = 60
"""Of the fixed point; each moves half of the way."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    step_s: float
    generate_s: float
    """Of a batch, with as many rows as there are."""
    train_s: float
    """Of a batch, with its publication."""
    reward_s: float
    num_rows: float
    """That a generator decodes together."""


def steady_state(recipe: Recipe, costs: Costs, lengths: Lengths) -> SteadyState:
    batch_size = recipe.controller.batch_size
    train_s = costs.mean_train_s(batch_size, lengths) + costs.publish_s
    reward_s = costs.reward_s * batch_size
    if recipe.schedule == "sync" or not recipe.controller.max_staleness:
        num_rows = batch_size / recipe.cluster.num_generators
        generate_s = batch_generation_s(costs, lengths, num_rows, batch_size)
        step_s = max(generate_s, reward_s) + train_s + costs.load_s
        return SteadyState(step_s, generate_s, train_s, reward_s, num_rows)
    step_s, generate_s, num_rows = _overlapped(recipe, costs, lengths, max(train_s, reward_s))
    if recipe.cluster.has_one_gpu:
        step_s = max(generate_s + train_s, reward_s)
    return SteadyState(step_s, generate_s, train_s, reward_s, num_rows)


def batch_generation_s(costs: Costs, lengths: Lengths, num_rows: float, batch_size: int) -> float:
    """Return how long generators take that begin so many rows each, until the longest has ended."""
    together = min(num_rows, costs.max_rows)
    full_s = (num_rows - together) * lengths.mean / costs.tokens_per_s(together, lengths)
    steps = np.linspace(0.0, lengths.longest_of(batch_size), 513)
    ended = np.searchsorted(np.sort(lengths.completion_tokens), steps, side="left")
    rows = together * (1 - ended / len(lengths.completion_tokens))
    seconds = costs.decode_step_s + rows * costs.row_s
    seconds = seconds + rows * (steps + lengths.prompt_tokens) * costs.cached_token_s
    return full_s + float(np.trapezoid(seconds, steps))


def _overlapped(
    recipe: Recipe, costs: Costs, lengths: Lengths, other_s: float
) -> tuple[float, float, float]:
    """Return step, generation of a batch and rows: generators have what is not in training."""
    controller, generators = recipe.controller, recipe.cluster.num_generators
    decoding_share = lengths.mean / lengths.mean_longest_of(controller.group_size)
    step_s, generate_s, num_rows = other_s, inf, 1.0
    for _ in range(ROUNDS):
        in_training = min(1.0, (other_s + costs.load_s) / step_s) * controller.batch_size
        running = (controller.max_staleness + 1) * controller.batch_size - in_training
        # A group keeps its slot until its longest member ends.
        slots = groups_in_flight(recipe) * controller.group_size
        most = min(running / generators, slots) * decoding_share
        num_rows = max(1.0, min(costs.max_rows, most))
        decoding_s = controller.batch_size * lengths.mean / generators
        decoding_s /= costs.tokens_per_s(num_rows, lengths)
        generate_s = decoding_s + _again_s(recipe, costs, lengths, num_rows)
        step_s = (step_s + max(generate_s, other_s)) / 2
    return step_s, generate_s, num_rows


def _again_s(recipe: Recipe, costs: Costs, lengths: Lengths, num_rows: float) -> float:
    """Return what new weights have computed again, once a step."""
    if recipe.generation.interruption != "interrupt":
        return 0.0
    return num_rows * lengths.decoding_tokens * costs.prefill_token_s
