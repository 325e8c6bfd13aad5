"""What a run would take on so many GPUs: split, step time, staleness, money, and what helps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import numpy as np

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError
from areal_flow.flow.bottleneck import Bottleneck, judge_speed
from areal_flow.flow.flow_setup import groups_in_flight
from areal_flow.planning.costs import ASSUMED, Costs, Efficiencies, Policy, costs_of
from areal_flow.planning.gpus import Gpu
from areal_flow.planning.lengths import Lengths
from areal_flow.planning.simulator import Simulated, simulate

MEASURED_STEPS = {"async": 12, "sync": 4}
"""At least: asynchronous steps repeat with a period of `max_staleness` + 1, and whole periods are
measured."""
MOST_SKIPPED = 12
"""Steps until a simulated run is steady."""
HARDLY_SLOWER = 0.05
"""Of the speed: what the generators that are left out together may have added."""


@dataclass(frozen=True)
class Job:
    """What is planned."""

    recipe: Recipe
    policy: Policy
    gpu: Gpu
    num_gpus: int
    lengths: Lengths
    efficiency: Efficiencies = ASSUMED

    def costs(self, recipe: Recipe) -> Costs:
        return costs_of(recipe, self.policy, self.gpu, self.lengths, self.efficiency)

    def steady(self, recipe: Recipe) -> SteadyState:
        return steady_state(recipe, self.costs(recipe), self.lengths)

    def splits(self) -> Iterator[Recipe]:
        """Yield the recipe with each split of the GPUs that its settings allow; trainer and
        generator share a single GPU."""
        recipe = self.recipe
        parts = recipe.generation.vllm.tensor_parallel_size
        ranks = recipe.trainer.parallel.context_ranks
        if self.num_gpus == parts == ranks == 1:
            yield with_cluster(recipe, num_generators=1, num_trainers=1, num_gpus=1)
        for trainers in range(ranks, self.num_gpus, ranks):
            left = self.num_gpus - trainers
            if left >= parts and left % parts == 0:
                yield with_cluster(recipe, num_generators=left // parts, num_trainers=trainers)


@dataclass(frozen=True)
class Plan:
    job: Job
    recipe: Recipe
    """With the split of the plan."""
    simulated: Simulated
    steady: SteadyState
    best: Recipe
    """With the split of the shortest steps."""
    changes: dict[str, float]
    """Single changes of the recipe, and the time of a step with each, over that without."""

    @property
    def num_generator_gpus(self) -> int:
        return generator_gpus(self.recipe)

    @property
    def hours(self) -> float:
        return self.recipe.num_steps * self.simulated.step_s / 3600

    def cost(self, price_per_hour: float | None = None) -> float:
        """Return US dollars to the last step, at a price of a GPU's hour."""
        price = self.job.gpu.price_per_hour if price_per_hour is None else price_per_hour
        return self.hours * self.job.num_gpus * price

    @property
    def bottleneck(self) -> Bottleneck:
        simulated, steady = self.simulated, self.steady
        if self.recipe.schedule == "sync" or not self.recipe.controller.max_staleness:
            longest, total = self.steady.generate_s / simulated.step_s, steady.generate_s
            text = f"Generation is waited for {longest:.0%} of a step: "
            return Bottleneck(f"{text}{total:,.0f} s until the longest completion of a batch ends")
        if steady.reward_s > max(steady.generate_s, steady.train_s):
            description = f"Scoring is the bottleneck: {steady.reward_s:,.0f} s a batch"
            return Bottleneck(description, "add reward workers: cluster.num_reward_workers")
        if self.recipe.cluster.has_one_gpu:
            shares = f"{steady.generate_s:,.1f} s to generate and {steady.train_s:,.1f} s to train"
            return Bottleneck(f"The GPU has both sides of a step: {shares}", "use a second GPU")
        waiting = 1 - min(1.0, steady.train_s / simulated.step_s)
        return judge_speed(waiting, simulated.generators_busy, 0.0)


def with_cluster(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=settings)})


def generator_gpus(recipe: Recipe) -> int:
    return recipe.cluster.num_generators * recipe.generation.vllm.tensor_parallel_size


def make_plan(job: Job, *, best: bool = False) -> Plan:
    """Plan a job, with the split that its recipe has, or with the best one.

    Raises:
        ConfigError: no split of so many GPUs is possible.
    """
    splits = list(job.splits())
    if not splits:
        parts = job.recipe.generation.vllm.tensor_parallel_size
        ranks = job.recipe.trainer.parallel.context_ranks
        raise ConfigError(
            f"--gpus {job.num_gpus}: expected at least {parts} for a generator "
            f"(generation.vllm.tensor_parallel_size) and {ranks} for trainers "
            "(trainer.parallel.context_ranks), in multiples of each"
        )
    fastest = fastest_split(job, splits)
    target = generator_gpus(job.recipe) / (
        generator_gpus(job.recipe) + job.recipe.cluster.num_trainers
    )
    chosen = (
        fastest
        if best
        else min(splits, key=lambda recipe: abs(generator_gpus(recipe) / job.num_gpus - target))
    )
    simulated = simulated_run(chosen, job.costs(chosen), job.lengths)
    return Plan(
        job, chosen, simulated, job.steady(chosen), fastest, changes_of(job, chosen, fastest)
    )


def fastest_split(job: Job, splits: Sequence[Recipe]) -> Recipe:
    """Return the split of the shortest step: the time falls and then rises along the splits, so
    only those beside the best of a few are tried all."""
    stride = ceil(len(splits) / 16)
    few = range(0, len(splits), stride)
    best = min(few, key=lambda index: job.steady(splits[index]).step_s)
    near = splits[max(0, best - stride + 1) : best + stride]
    return min(near, key=lambda recipe: job.steady(recipe).step_s)


def enough_generators(job: Job, between: tuple[int, int]) -> int:
    """Return the fewest generators within bounds with which steps take hardly longer than with the
    most of them: more would wait for the trainer."""

    def speed(number: int) -> float:
        recipe = with_cluster(job.recipe, num_generators=number)
        return 1 / simulated_run(recipe, job.costs(recipe), job.lengths).step_s

    min_number, max_number = between
    return bisect_left(
        range(max_number), (1 - HARDLY_SLOWER) * speed(max_number), lo=min_number, key=speed
    )


def simulated_run(recipe: Recipe, costs: Costs, lengths: Lengths) -> Simulated:
    """Simulate steps of a recipe, once they are steady."""
    period, measured = recipe.controller.max_staleness + 1, MEASURED_STEPS[recipe.schedule]
    skipped = 1 if recipe.schedule == "sync" else min(MOST_SKIPPED, period + 3)
    if recipe.schedule == "async" and period <= 2 * measured:
        measured = period * ceil(measured / period)
    steps = recipe.model_copy(update={"num_steps": skipped + measured})
    return simulate(steps, costs, lengths, num_skipped=skipped)


def changes_of(job: Job, recipe: Recipe, fastest: Recipe) -> dict[str, float]:
    """Return what single changes of a recipe would do to the time of its steps."""
    now = job.steady(recipe).step_s
    changed = {
        f"{generator_gpus(fastest)} GPUs that generate and {fastest.cluster.num_trainers} that "
        "train": fastest,
        "schedule = async": recipe.model_copy(update={"schedule": "async"}),
        "twice the reward workers": with_cluster(
            recipe, num_reward_workers=2 * recipe.cluster.num_reward_workers
        ),
        **_setting(recipe, "controller", "max_staleness", 2 * recipe.controller.max_staleness or 1),
        **_setting(recipe, "generation", "max_num_seqs", 2 * recipe.generation.max_num_seqs),
        **_setting(recipe, "generation", "interruption", "keep"),
        **_setting(recipe, "trainer", "activations", "keep"),
    }
    ratios = {name: job.steady(each).step_s / now for name, each in changed.items()}
    more = replace(job, num_gpus=2 * job.num_gpus)
    best = fastest_split(more, list(more.splits()))
    ratios["twice the GPUs, split best"] = more.steady(best).step_s / now
    return {
        name: ratio for name, ratio in sorted(ratios.items(), key=lambda f: f[1]) if ratio < 0.99
    }


def _setting(recipe: Recipe, section: str, name: str, value: Any) -> dict[str, Recipe]:
    changed = getattr(recipe, section).model_copy(update={name: value})
    return {f"{section}.{name} = {value}": recipe.model_copy(update={section: changed})}


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
        max_rows = min(running / generators, slots) * decoding_share
        num_rows = max(1.0, min(costs.max_rows, max_rows))
        decoding_s = controller.batch_size * lengths.mean / generators
        decoding_s /= costs.tokens_per_s(num_rows, lengths)
        generate_s = decoding_s + _reprefill_s(recipe, costs, lengths, num_rows)
        step_s = (step_s + max(generate_s, other_s)) / 2
    return step_s, generate_s, num_rows


def _reprefill_s(recipe: Recipe, costs: Costs, lengths: Lengths, num_rows: float) -> float:
    """Return what new weights have computed again, once a step."""
    if recipe.generation.interruption != "interrupt":
        return 0.0
    return num_rows * lengths.decoding_tokens * costs.prefill_token_s
