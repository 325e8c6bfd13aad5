"""Plan a run on N GPUs: split, step time, staleness, cost and bottleneck.

Splits and changes of the recipe are ranked by `steady_state`, in closed form; the plan itself comes
from the simulator. `calibrate` fits the efficiencies of both to a recorded run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import fmean
from typing import Any

import numpy as np

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.step_metrics import SPEED_AREA
from areal_flow.flow.bottleneck import Bottleneck, judge_speed
from areal_flow.flow.flow_setup import groups_in_flight
from areal_flow.planning.costs import ASSUMED, Costs, Efficiencies, Lengths, Policy, costs_of
from areal_flow.planning.gpus import Gpu
from areal_flow.planning.simulator import Simulated, simulate
from areal_flow.rollout.engines.torch_engine import PREFILL_TOKENS_PER_STEP

MEASURED_STEPS = {"async": 12, "sync": 4}
"""Minimum of measured steps. Asynchronous steps repeat with a period of `max_staleness` + 1,
of which whole periods are measured."""
MAX_SKIPPED_STEPS = 12
"""Simulated steps before a run counts as steady."""
SPEED_TOLERANCE = 0.05
"""Share of the speed that fewer generators may lose."""
FIXED_POINT_ROUNDS = 60
"""Each round moves half of the way."""
STALL = f"{SPEED_AREA}weights_stall_s_mean"
WARM_UP_SHARE = 0.25
"""Share of a run's steps before it counts as steady."""
MIN_CALIBRATION_STEPS = 8
MAX_CALIBRATION_STEPS = 48
"""At most this many steps of a longer run are simulated."""
BISECTION_ROUNDS = 8


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
        """Yield the recipe with each possible split of the GPUs; a single GPU is shared."""
        recipe = self.recipe
        parts = recipe.generation.vllm.tensor_parallel_size
        ranks = recipe.trainer.parallel.context_ranks
        if self.num_gpus == parts == ranks == 1:
            yield with_cluster(recipe, num_generators=1, num_trainers=1, num_gpus=1)
        for trainers in range(ranks, self.num_gpus, ranks):
            left = self.num_gpus - trainers
            if left >= parts and left % parts == 0:
                split = {"num_generators": left // parts, "num_trainers": trainers}
                yield with_cluster(recipe, num_gpus=None, **split)  # nothing shares a GPU


@dataclass(frozen=True)
class Plan:
    job: Job
    recipe: Recipe
    """The recipe with the chosen split."""
    simulated: Simulated
    steady: SteadyState
    best: Recipe
    """The recipe with the fastest split."""
    changes: dict[str, float]
    """Ratio of step times, changed to unchanged, by change of the recipe."""

    @property
    def num_generator_gpus(self) -> int:
        return generator_gpus(self.recipe)

    @property
    def hours(self) -> float:
        return self.recipe.num_steps * self.simulated.step_s / 3600

    def cost(self, price_per_hour: float | None = None) -> float:
        """Return the cost of all steps in US dollars."""
        price = self.job.gpu.price_per_hour if price_per_hour is None else price_per_hour
        return self.hours * self.job.num_gpus * price

    @property
    def bottleneck(self) -> Bottleneck:
        simulated, steady = self.simulated, self.steady
        if self.recipe.schedule == "sync" or not self.recipe.controller.max_staleness:
            share = steady.generate_s / simulated.step_s
            return Bottleneck(
                f"Generation is waited for {share:.0%} of a step: {steady.generate_s:,.0f} s until "
                "the longest completion of a batch ends"
            )
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
    """Plan a job with the split closest to its recipe's, or with the fastest one.

    Raises:
        ConfigError: the GPUs cannot be split.
    """
    recipe = job.recipe
    splits = list(job.splits())
    if not splits:
        parts = recipe.generation.vllm.tensor_parallel_size
        ranks = recipe.trainer.parallel.context_ranks
        raise ConfigError(
            f"--gpus {job.num_gpus}: expected at least {parts} for a generator "
            f"(generation.vllm.tensor_parallel_size) and {ranks} for trainers "
            "(trainer.parallel.context_ranks), in multiples of each"
        )
    fastest = fastest_split(job, splits)
    target = generator_gpus(recipe) / (generator_gpus(recipe) + recipe.cluster.num_trainers)
    closest = min(splits, key=lambda split: abs(generator_gpus(split) / job.num_gpus - target))
    chosen = fastest if best else closest
    return Plan(
        job,
        chosen,
        simulated_run(chosen, job.costs(chosen), job.lengths),
        job.steady(chosen),
        fastest,
        changes_of(job, chosen, fastest),
    )


def fastest_split(job: Job, splits: Sequence[Recipe]) -> Recipe:
    """Return the split with the shortest step: step time falls, then rises along the splits.

    So every split is tried only around the best of a coarse grid.
    """
    stride = ceil(len(splits) / 16)
    grid = range(0, len(splits), stride)
    best = min(grid, key=lambda index: job.steady(splits[index]).step_s)
    neighbours = splits[max(0, best - stride + 1) : best + stride]
    return min(neighbours, key=lambda recipe: job.steady(recipe).step_s)


def enough_generators(job: Job, between: tuple[int, int]) -> int:
    """Return the smallest number of generators that is about as fast as the upper bound.

    Any more would mostly wait for the trainer.
    """

    def speed(number: int) -> float:
        recipe = with_cluster(job.recipe, num_generators=number)
        return 1 / simulated_run(recipe, job.costs(recipe), job.lengths).step_s

    min_number, max_number = between
    return bisect_left(
        range(max_number), (1 - SPEED_TOLERANCE) * speed(max_number), lo=min_number, key=speed
    )


def simulated_run(recipe: Recipe, costs: Costs, lengths: Lengths) -> Simulated:
    """Simulate a recipe and measure its steady steps."""
    period, measured = recipe.controller.max_staleness + 1, MEASURED_STEPS[recipe.schedule]
    skipped = 1 if recipe.schedule == "sync" else min(MAX_SKIPPED_STEPS, period + 3)
    if recipe.schedule == "async" and period <= 2 * measured:
        measured = period * ceil(measured / period)
    steps = recipe.model_copy(update={"num_steps": skipped + measured})
    return simulate(steps, costs, lengths, num_skipped=skipped)


def changes_of(job: Job, recipe: Recipe, fastest: Recipe) -> dict[str, float]:
    """Return step times after single changes of a recipe, relative to the recipe's, below 1."""
    unchanged_s = job.steady(recipe).step_s
    variants = {
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
    ratios = {name: job.steady(each).step_s / unchanged_s for name, each in variants.items()}
    doubled = replace(job, num_gpus=2 * job.num_gpus)
    best = fastest_split(doubled, list(doubled.splits()))
    ratios["twice the GPUs, split best"] = doubled.steady(best).step_s / unchanged_s
    by_ratio = sorted(ratios.items(), key=lambda item: item[1])
    return {name: ratio for name, ratio in by_ratio if ratio < 0.99}


def _setting(recipe: Recipe, section: str, name: str, value: Any) -> dict[str, Recipe]:
    changed = getattr(recipe, section).model_copy(update={name: value})
    return {f"{section}.{name} = {value}": recipe.model_copy(update={section: changed})}


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Seconds per batch, and the load of a generator."""

    step_s: float
    generate_s: float
    train_s: float
    """Publication included."""
    reward_s: float
    num_rows: float
    """Rows that a generator decodes together."""


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
    """Return the time from the start of all rows of each generator to the end of the longest."""
    concurrent = min(num_rows, costs.max_rows)
    full_s = (num_rows - concurrent) * lengths.mean / costs.tokens_per_s(concurrent, lengths)
    steps = np.linspace(0.0, lengths.longest_of(batch_size), 513)
    ended = np.searchsorted(np.sort(lengths.completion_tokens), steps, side="left")
    rows = concurrent * (1 - ended / len(lengths.completion_tokens))
    seconds = costs.decode_step_s + rows * costs.row_s
    seconds = seconds + rows * (steps + lengths.prompt_tokens) * costs.cached_token_s
    return full_s + float(np.trapezoid(seconds, steps))


def _overlapped(
    recipe: Recipe, costs: Costs, lengths: Lengths, other_s: float
) -> tuple[float, float, float]:
    """Return step time, generation time and rows: what is not in training is on the generators."""
    controller, generators = recipe.controller, recipe.cluster.num_generators
    decoding_share = lengths.mean / lengths.mean_longest_of(controller.group_size)
    step_s, generate_s, num_rows = other_s, inf, 1.0
    for _ in range(FIXED_POINT_ROUNDS):
        in_training = min(1.0, (other_s + costs.load_s) / step_s) * controller.batch_size
        running = (controller.max_staleness + 1) * controller.batch_size - in_training
        # A group keeps its slot until its longest member ends.
        slots = groups_in_flight(recipe) * controller.group_size
        max_rows = min(running / generators, slots) * decoding_share
        num_rows = max(1.0, min(costs.max_rows, max_rows))
        decoding_s = controller.batch_size * lengths.mean / generators
        decoding_s /= costs.tokens_per_s(num_rows, lengths)
        generate_s = decoding_s
        if recipe.generation.interruption == "interrupt":  # new weights recompute the cache
            generate_s += num_rows * lengths.decoding_tokens * costs.prefill_token_s
        step_s = (step_s + max(generate_s, other_s)) / 2
    return step_s, generate_s, num_rows


@dataclass(frozen=True, slots=True)
class Calibration:
    efficiency: Efficiencies
    measured_step_s: float
    predicted_step_s: float
    measured_staleness: float
    predicted_staleness: float

    @property
    def sentence(self) -> str:
        error = self.predicted_step_s / self.measured_step_s - 1
        return (
            f"Calibrated: a step of that run took {self.measured_step_s:.3g} s, its plan has "
            f"{self.predicted_step_s:.3g} s ({error:+.0%}); staleness "
            f"{self.measured_staleness:.2f} and {self.predicted_staleness:.2f}"
        )


def steady(rows: Any) -> Any:
    """Return a run's steps, or trajectories, without those of its warm-up."""
    return rows[int(WARM_UP_SHARE * len(rows)) :]


def simulate_steps(recipe: Recipe, costs: Costs, lengths: Lengths, num_steps: int) -> Simulated:
    """Simulate a run's first steps, and measure those that are steady."""
    num_steps = min(num_steps, MAX_CALIBRATION_STEPS)
    recipe = recipe.model_copy(update={"num_steps": num_steps})
    return simulate(recipe, costs, lengths, num_skipped=int(WARM_UP_SHARE * num_steps))


def calibrate(job: Job, steps: Sequence[Mapping[str, Any]], *, commit_s: float) -> Calibration:
    """Fit efficiencies to a run: training, prefill, and the time of a decode step.

    Training is fitted to the trainer's seconds, prefill to the time for which new weights stop a
    generator, and decoding to the generators' seconds per token. Step time and staleness are not
    fitted, but follow from the simulated controller.

    Args:
        job: the run's recipe, and the GPU of each of its workers.
        steps: rows of its ledger, without version 0.
        commit_s: seconds from the end of a group to its place in the log, scoring included.

    Raises:
        RunError: there are too few steps.
    """
    rows = steady(steps)
    if len(rows) < MIN_CALIBRATION_STEPS:
        raise RunError(
            f"expected {MIN_CALIBRATION_STEPS} steady steps to calibrate to, found {len(rows)}"
        )

    def mean(*names: str) -> float:
        return sum(fmean(row[name] for row in rows) for name in names)

    recipe, lengths = job.recipe, job.lengths
    token_s = mean("seconds_generate") / mean("num_generated_tokens")
    training_s = mean("seconds_read", "seconds_train", "seconds_stage")
    efficiency = Efficiencies(
        training=1.0,
        prefill=1.0,
        trajectory_s=0.0,
        reward_s=0.0,
        publish_s=max(0.0, mean("seconds_step") - mean("seconds_wait") - training_s),
        commit_s=commit_s,
    )
    at_peak = replace(job, efficiency=efficiency).costs(recipe)
    training = prefill = at_peak.mean_train_s(recipe.controller.batch_size, lengths) / training_s
    if stalls := [row[STALL] for row in rows if isinstance(row.get(STALL), float)]:
        # At most this much is prefilled before the next token; a stall includes some decode time.
        tokens = min(PREFILL_TOKENS_PER_STEP, at_peak.max_rows * lengths.decoding_tokens)
        prefill = max(training, tokens * at_peak.prefill_token_s / fmean(stalls))
    efficiency = replace(efficiency, training=training, prefill=prefill)
    low, high = 0.0, token_s * recipe.generation.max_num_seqs
    for _ in range(BISECTION_ROUNDS):
        efficiency = replace(efficiency, decode_step_s=(low + high) / 2)
        costs = replace(job, efficiency=efficiency).costs(recipe)
        simulated = simulate_steps(recipe, costs, lengths, len(steps))
        busy_s = simulated.generators_busy * recipe.cluster.num_generators
        if busy_s / simulated.generated_tokens_per_s > token_s:
            high = efficiency.decode_step_s
        else:
            low = efficiency.decode_step_s
    return Calibration(
        efficiency,
        mean("seconds_step"),
        simulated.step_s,
        mean("staleness_mean"),
        simulated.staleness_mean,
    )
