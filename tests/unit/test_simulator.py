"""Virtual generators against sums by hand, and runs of them under the real controller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_flow.config import Recipe
from areal_flow.core.types import VersionSpan
from areal_flow.log.ledger_row import group_seeds
from areal_flow.planning.costs import (
    NUM_DRAWN,
    Costs,
    Lengths,
    assumed_lengths,
    recorded_lengths,
)
from areal_flow.planning.planner import batch_generation_s, steady_state, with_cluster
from areal_flow.planning.simulator import FaultModel, Simulated, simulate
from areal_flow.planning.virtual_time import VirtualGenerator, run_in_virtual_time
from tests.flow_fakes import flow_recipe

COSTS = Costs(
    decode_step_s=1.0,
    row_s=0.25,
    cached_token_s=0.0,
    prefill_token_s=0.5,
    max_rows=2,
    train_token_s=0.0,
    train_pair_s=0.0,
    publish_s=0.0,
    load_s=0.0,
)
LENGTHS = assumed_lengths(1000, prompt_tokens=10.0, group_share=0.0)
BATCH_SIZE, SKIPPED = 96, 8


def test_a_row_decodes_at_the_speed_that_the_rows_beside_it_leave() -> None:
    async def main() -> list[float]:
        generator, loop = VirtualGenerator(COSTS), asyncio.get_running_loop()
        ended: list[float] = []
        rows = [generator.complete([num_tokens]) for num_tokens in (2, 6, 3)]
        for row in rows:
            row.add_done_callback(lambda _: ended.append(loop.time()))
        await asyncio.gather(*rows)
        return ended

    # Two rows at 1.5 s a step until the third has had its 3 steps, then one at 1.25 s.
    assert run_in_virtual_time(main()) == pytest.approx([2 * 1.5, 5 * 1.5, 5 * 1.5 + 1.25])


def test_each_token_in_the_cache_makes_the_next_steps_longer() -> None:
    async def main() -> float:
        costs = replace(COSTS, cached_token_s=0.1)
        generator = VirtualGenerator(costs, prompt_tokens=3.0)
        await generator.complete([4])
        return asyncio.get_running_loop().time()

    prefill_s, steps_s = 3 * 0.5, 4 * (1.25 + 0.1 * 3) + 0.1 * 4**2 / 2
    assert run_in_virtual_time(main()) == pytest.approx(prefill_s + steps_s)


@pytest.mark.parametrize(
    ("rule", "spans", "seconds"),
    [
        ("interrupt", (VersionSpan(0, 4), VersionSpan(3, 6)), 10 * 1.25 + 4 * 0.5),
        ("keep", (VersionSpan(0, 4), VersionSpan(3, 6)), 10 * 1.25),
        ("drain", (VersionSpan(0, 10),), 10 * 1.25),
    ],
)
def test_new_weights_do_to_a_running_completion_what_the_rule_says(
    rule: Any, spans: object, seconds: float
) -> None:
    async def main() -> tuple[object, float]:
        generator = VirtualGenerator(COSTS, interruption=rule)
        group = generator.complete([10])
        await asyncio.sleep(4 * 1.25)
        arrived = generator.load(3)
        (result,) = await group
        ended = asyncio.get_running_loop().time()
        await arrived
        assert generator.version == 3
        return result, ended

    assert run_in_virtual_time(main()) == (spans, pytest.approx(seconds))


def test_a_completion_that_begins_after_new_weights_has_one_version() -> None:
    async def main() -> object:
        generator = VirtualGenerator(COSTS)
        for version in (1, 2):
            generator.load(version)
        return await generator.complete([5])

    assert run_in_virtual_time(main()) == [(VersionSpan(2, 5),)]


def recipe_of(eta: int, *, schedule: str = "async", generators: int = 4) -> Recipe:
    recipe = flow_recipe(num_steps=18, max_staleness=eta, batch_size=BATCH_SIZE, group_size=2)
    recipe = recipe.model_copy(update={"schedule": schedule})
    return with_cluster(recipe, num_generators=generators)


def decoding(**changes: float) -> Costs:
    """Return costs dominated by generation."""
    costs = replace(COSTS, decode_step_s=0.01, row_s=1e-4, prefill_token_s=1e-6, max_rows=128)
    return replace(costs, **{"train_token_s": 0.01 / LENGTHS.mean} | changes)


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_closed_form_has_the_step_of_a_simulated_run(eta: int) -> None:
    recipe, costs = recipe_of(eta), decoding(publish_s=0.2, load_s=0.1)
    predicted = steady_state(recipe, costs, LENGTHS)
    simulated = simulate(recipe, costs, LENGTHS, num_skipped=SKIPPED)
    assert predicted.step_s == pytest.approx(simulated.step_s, rel=0.2)
    assert 0.3 < simulated.staleness_mean <= eta


def test_a_barrier_takes_generation_of_a_batch_and_training_one_after_the_other() -> None:
    recipe, costs = recipe_of(0, schedule="sync"), decoding(publish_s=0.2, load_s=0.1)
    predicted = steady_state(recipe, costs, LENGTHS)
    simulated = simulate(recipe, costs, LENGTHS, num_skipped=5)
    assert simulated.step_s == pytest.approx(predicted.step_s, rel=0.1)
    assert simulated.staleness_mean == 0.0


def test_a_batch_of_equal_completions_takes_the_sum_of_its_steps() -> None:
    equal = recorded_lengths([0], [100] * 64, source="by hand")
    costs = replace(COSTS, cached_token_s=0.01, max_rows=8)
    by_hand = 100 * (1 + 8 * 0.25) + 0.01 * 8 * 100**2 / 2
    assert batch_generation_s(costs, equal, 8, 64) == pytest.approx(by_hand, rel=0.01)


def test_slow_generators_failures_and_slow_loads_cost_what_they_take_away() -> None:
    recipe, costs = recipe_of(2), decoding()

    def simulated_with(**faults: Any) -> Simulated:
        with_them = FaultModel(**faults)
        return simulate(recipe, costs, LENGTHS, num_skipped=SKIPPED, faults=with_them)

    undisturbed = simulated_with()
    slow = simulated_with(speeds=(1.0, 0.5)).trained_tokens_per_s
    assert slow == pytest.approx(0.75 * undisturbed.trained_tokens_per_s, rel=0.12)
    late = simulated_with(slow_load_s=lambda generator: 5.0)
    assert late.staleness_mean > undisturbed.staleness_mean
    failing = simulated_with(failures_per_hour=120.0, restart_s=30.0)
    assert failing.num_failures > 2
    assert failing.trained_tokens_per_s < undisturbed.trained_tokens_per_s
    assert sum(failing.staleness.values()) == pytest.approx(1.0)


def test_scoring_may_be_the_slowest_part() -> None:
    simulated = simulate(recipe_of(2), decoding(reward_s=0.2), LENGTHS, num_skipped=SKIPPED)
    assert simulated.step_s == pytest.approx(BATCH_SIZE * 0.2, rel=0.05)


def test_on_one_gpu_generation_and_training_take_the_time_of_both() -> None:
    recipe = with_cluster(recipe_of(2, generators=1), num_gpus=1)
    alone = with_cluster(recipe, num_gpus=2)
    costs = decoding(train_token_s=0.01 / LENGTHS.mean + 5e-5)
    shared, parted = (
        simulate(each, costs, LENGTHS, num_skipped=SKIPPED) for each in (recipe, alone)
    )
    # The generator works all the time, so a step is as long as both of its sides on GPUs alone.
    side_s = parted.generators_busy * parted.step_s
    assert shared.generators_busy == pytest.approx(1.0, abs=0.02)
    assert shared.step_s == pytest.approx(side_s + parted.train_s, rel=0.1)
    assert steady_state(recipe, costs, LENGTHS).step_s == pytest.approx(shared.step_s, rel=0.2)


def test_assumed_lengths_have_the_stated_mean_and_cut() -> None:
    lengths = assumed_lengths(27_648)
    assert lengths.mean == pytest.approx(9_276, rel=0.001)
    assert lengths.completion_tokens.max() == 27_648
    assert 0.05 < np.mean(lengths.completion_tokens == 27_648) < 0.1


def test_token_and_group_means_are_those_of_draws() -> None:
    lengths: Lengths = recorded_lengths([2, 4], [1, 3], source="by hand")
    assert lengths.decoding_tokens == 3 + (1 + 9) / 2 / 2 / 2
    assert lengths.mean_longest_of(2) == pytest.approx(0.25 * 1 + 0.75 * 3, abs=0.05)
    assert lengths.of_group([0, NUM_DRAWN - 1, NUM_DRAWN]) == [1, 3, 1]


@pytest.mark.parametrize("share", [0.0, 0.64])
def test_completions_of_one_prompt_have_a_share_of_variance_in_common(share: float) -> None:
    lengths = assumed_lengths(100_000, mean=900.0, group_share=share)
    groups = [lengths.of_group(group_seeds(0, index, 8)) for index in range(500)]
    drawn, group_of = np.ravel(groups), np.repeat(range(500), 8)
    recorded = recorded_lengths([1], drawn, source="", groups=group_of)
    assert recorded.group_share == pytest.approx(share, abs=0.05)
    assert recorded.mean == pytest.approx(900, rel=0.1)
    assert np.mean([max(group) for group in groups]) == pytest.approx(
        lengths.mean_longest_of(8), rel=0.1
    )
