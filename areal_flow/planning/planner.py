"""Plan a run on N GPUs: split, step time, staleness, cost and bottleneck.

`steady_state` estimates a step analytically, to rank splits and changes of the recipe; the numbers
of the plan come from the simulator. `calibrate` fits the efficiencies of both to a recorded run.
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
from areal_flow.core.types import SPEED_AREA
from areal_flow.flow.diagnosis import Bottleneck, judge_speed
from areal_flow.flow.flow_setup import groups_in_flight
from areal_flow.planning.costs import ASSUMED, Costs, Efficiencies, Lengths, Policy, costs_of
from areal_flow.planning.gpus import Gpu
from areal_flow.planning.simulator import Simulated, simulate
from areal_flow.rollout.engines.torch_engine import PREFILL_TOKENS_PER_STEP

MEASURED_STEPS = {"async": 12, "sync": 4}
"""Minimum number of measured steps. Asynchronous steps repeat with a period of `max_staleness` + 1,
and whole periods are measured."""
MAX_SKIPPED_STEPS = 12
"""Maximum number of simulated steps before a run counts as steady."""
SPEED_TOLERANCE = 0.05
"""Relative loss of speed that is accepted to need fewer generators."""
FIXED_POINT_ROUNDS = 60
"""Each round moves the step time halfway to its new estimate."""
STALL = f"{SPEED_AREA}weights_stall_s_mean"
WARM_UP_SHARE = 0.25
"""Share of a run's steps before it counts as steady."""
MIN_CALIBRATION_STEPS = 8
MAX_CALIBRATION_STEPS = 48
"""At most this many steps of a longer run are simulated."""
BISECTION_ROUNDS = 8


@dataclass(frozen=True)
class Job:
    """A recipe, and the GPUs to plan it for."""

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
        tensor_parallel = recipe.generation.vllm.tensor_parallel_size
        context_ranks = recipe.trainer.parallel.context_ranks
        if self.num_gpus == tensor_parallel == context_ranks == 1:
            yield with_cluster(recipe, num_generators=1, num_trainers=1, num_gpus=1)
        for num_trainers in range(context_ranks, self.num_gpus, context_ranks):
            num_generators, num_idle = divmod(self.num_gpus - num_trainers, tensor_parallel)
            if num_generators and not num_idle:
                split = {"num_generators": num_generators, "num_trainers": num_trainers}
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
    """For each change of the recipe, its step time divided by that of the unchanged recipe."""

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
                f"The trainer waits for generation {share:.0%} of a step: {steady.generate_s:,.0f} "
                "s until the longest completion of a batch ends"
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
        raise ConfigError(
            f"--gpus {job.num_gpus}: expected at least "
            f"{recipe.generation.vllm.tensor_parallel_size} for a generator "
            "(generation.vllm.tensor_parallel_size) and "
            f"{recipe.trainer.parallel.context_ranks} for trainers "
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
    """Return the split with the shortest step.

    Step time first falls and then rises along the splits, so this tries a coarse grid, then every
    split near the best of the grid.
    """
    stride = ceil(len(splits) / 16)
    grid = range(0, len(splits), stride)
    best = min(grid, key=lambda index: job.steady(splits[index]).step_s)
    neighbours = splits[max(0, best - stride + 1) : best + stride]
    return min(neighbours, key=lambda recipe: job.steady(recipe).step_s)


def enough_generators(job: Job, bounds: tuple[int, int]) -> int:
    """Return the smallest number of generators that is about as fast as the upper bound.

    More generators would mostly wait for the trainer.
    """

    def speed(num_generators: int) -> float:
        recipe = with_cluster(job.recipe, num_generators=num_generators)
        return 1 / simulated_run(recipe, job.costs(recipe), job.lengths).step_s

    lower, upper = bounds
    target = (1 - SPEED_TOLERANCE) * speed(upper)
    return bisect_left(range(upper), target, lo=lower, key=speed)


def simulated_run(recipe: Recipe, costs: Costs, lengths: Lengths) -> Simulated:
    """Simulate a recipe and measure its steady steps."""
    period, measured = recipe.controller.max_staleness + 1, MEASURED_STEPS[recipe.schedule]
    skipped = 1 if recipe.schedule == "sync" else min(MAX_SKIPPED_STEPS, period + 3)
    if recipe.schedule == "async" and period <= 2 * measured:
        measured = period * ceil(measured / period)
    recipe = recipe.model_copy(update={"num_steps": skipped + measured})
    return simulate(recipe, costs, lengths, num_skipped=skipped)


def changes_of(job: Job, recipe: Recipe, fastest: Recipe) -> dict[str, float]:
    """Return `Plan.changes`: the single changes of a recipe that shorten its step.

    Args:
        fastest: the recipe with the fastest split.
    """
    unchanged_s = job.steady(recipe).step_s
    variants = {
        f"{generator_gpus(fastest)} generator GPUs and {fastest.cluster.num_trainers} trainer "
        "GPUs": fastest,
        "schedule = async": recipe.model_copy(update={"schedule": "async"}),
        "twice the reward workers": with_cluster(
            recipe, num_reward_workers=2 * recipe.cluster.num_reward_workers
        ),
        **_changed(recipe, "controller", "max_staleness", 2 * recipe.controller.max_staleness or 1),
        **_changed(recipe, "generation", "max_num_seqs", 2 * recipe.generation.max_num_seqs),
        **_changed(recipe, "generation", "interruption", "keep"),
        **_changed(recipe, "trainer", "activations", "keep"),
    }
    ratios = {name: job.steady(variant).step_s / unchanged_s for name, variant in variants.items()}
    doubled = replace(job, num_gpus=2 * job.num_gpus)
    best = fastest_split(doubled, list(doubled.splits()))
    ratios["twice the GPUs, with the fastest split"] = doubled.steady(best).step_s / unchanged_s
    by_ratio = sorted(ratios.items(), key=lambda item: item[1])
    return {name: ratio for name, ratio in by_ratio if ratio < 0.99}


def _changed(recipe: Recipe, section: str, name: str, value: Any) -> dict[str, Recipe]:
    changed = getattr(recipe, section).model_copy(update={name: value})
    return {f"{section}.{name} = {value}": recipe.model_copy(update={section: changed})}


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Seconds per batch, and the load of a generator."""

    step_s: float
    generate_s: float
    train_s: float
    """Including publication."""
    reward_s: float
    num_rows: float
    """Rows that a generator decodes at the same time."""


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
    """Return the time a generator needs for `num_rows` rows that all arrive at the start."""
    concurrent = min(num_rows, costs.max_rows)
    queue_s = (num_rows - concurrent) * lengths.mean / costs.tokens_per_s(concurrent, lengths)
    positions = np.linspace(0.0, lengths.longest_of(batch_size), 513)
    num_ended = np.searchsorted(np.sort(lengths.completion_tokens), positions, side="left")
    rows = concurrent * (1 - num_ended / len(lengths.completion_tokens))
    seconds_per_token = costs.decode_step_s + rows * costs.row_s
    seconds_per_token += rows * (positions + lengths.prompt_tokens) * costs.cached_token_s
    return queue_s + float(np.trapezoid(seconds_per_token, positions))


def _overlapped(
    recipe: Recipe, costs: Costs, lengths: Lengths, train_or_reward_s: float
) -> tuple[float, float, float]:
    """Return step time, generation time and rows per generator of an asynchronous run.

    The gate is full: of the (max_staleness + 1) * batch_size trajectories that it admits, those
    that are not in training are on the generators. Their number depends on the step time and the
    step time on them, so this iterates to the fixed point.

    Args:
        train_or_reward_s: seconds per batch of the slower of training and scoring.
    """
    controller, num_generators = recipe.controller, recipe.cluster.num_generators
    decoding_share = lengths.mean / lengths.mean_longest_of(controller.group_size)
    step_s, generate_s, num_rows = train_or_reward_s, inf, 1.0
    for _ in range(FIXED_POINT_ROUNDS):
        training_share = min(1.0, (train_or_reward_s + costs.load_s) / step_s)
        in_training = training_share * controller.batch_size
        running = (controller.max_staleness + 1) * controller.batch_size - in_training
        # A group keeps its slot until its longest member ends.
        slots = groups_in_flight(recipe) * controller.group_size
        max_rows = min(running / num_generators, slots) * decoding_share
        num_rows = max(1.0, min(costs.max_rows, max_rows))
        tokens_per_generator = controller.batch_size * lengths.mean / num_generators
        generate_s = tokens_per_generator / costs.tokens_per_s(num_rows, lengths)
        if recipe.generation.interruption == "interrupt":  # new weights recompute the cache
            generate_s += num_rows * lengths.decoding_tokens * costs.prefill_token_s
        step_s = (step_s + max(generate_s, train_or_reward_s)) / 2
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
            f"Calibrated: a step of that run took {self.measured_step_s:.3g} s, the plan predicts "
            f"{self.predicted_step_s:.3g} s ({error:+.0%}); mean staleness was "
            f"{self.measured_staleness:.2f}, predicted {self.predicted_staleness:.2f}"
        )


def without_warm_up(rows: Any) -> Any:
    """Return a run's steps or trajectories without those of its warm-up."""
    return rows[int(WARM_UP_SHARE * len(rows)) :]


def simulate_steps(recipe: Recipe, costs: Costs, lengths: Lengths, num_steps: int) -> Simulated:
    """Simulate a run's first steps, and measure those after its warm-up."""
    num_steps = min(num_steps, MAX_CALIBRATION_STEPS)
    recipe = recipe.model_copy(update={"num_steps": num_steps})
    return simulate(recipe, costs, lengths, num_skipped=int(WARM_UP_SHARE * num_steps))


def calibrate(job: Job, steps: Sequence[Mapping[str, Any]], *, commit_s: float) -> Calibration:
    """Fit efficiencies to a run: training, prefill, and the time of a decode step.

    Training is fitted to the trainer's seconds, prefill to a generator's stalls for new weights,
    and decoding to the generators' seconds per token. Step time and staleness are not fitted: they
    follow from the simulated controller, and show how good the fit is.

    Args:
        job: the run's recipe, and the GPU of each of its workers.
        steps: rows of its ledger, without version 0.
        commit_s: seconds from the end of a group to its commit, including scoring.

    Raises:
        RunError: there are too few steps.
    """
    rows = without_warm_up(steps)
    if len(rows) < MIN_CALIBRATION_STEPS:
        raise RunError(
            f"expected {MIN_CALIBRATION_STEPS} steady steps to calibrate to, found {len(rows)}"
        )

    def mean(*names: str) -> float:
        return sum(fmean(row[name] for row in rows) for name in names)

    recipe, lengths = job.recipe, job.lengths
    token_s = mean("generate_s") / mean("num_generated_tokens")
    training_s = mean("read_s", "train_s", "stage_s")
    efficiency = Efficiencies(
        training=1.0,
        prefill=1.0,
        token_s=0.0,
        reward_s=0.0,
        publish_s=max(0.0, mean("step_s") - mean("wait_s") - training_s),
        commit_s=commit_s,
    )
    at_peak = replace(job, efficiency=efficiency).costs(recipe)
    training = prefill = at_peak.mean_train_s(recipe.controller.batch_size, lengths) / training_s
    if stalls := [row[STALL] for row in rows if isinstance(row.get(STALL), float)]:
        # The engine prefills at most this many tokens before the next decode step. A stall also
        # includes some decode time.
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
        mean("step_s"),
        simulated.step_s,
        mean("staleness_mean"),
        simulated.staleness_mean,
    )
