"""Virtual generators against sums by hand, and runs of them under the real controller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_flow.config import Recipe
from areal_flow.planning.costs import Costs
from areal_flow.planning.lengths import Lengths, assumed_lengths, recorded_lengths
from areal_flow.planning.planner import with_cluster
from areal_flow.planning.simulator import Troubles, simulate
from areal_flow.planning.steady_state import batch_generation_s, steady_state
from areal_flow.planning.virtual_generator import VirtualGenerator
from areal_flow.planning.virtual_time import run_in_virtual_time
from areal_flow.types import VersionSpan
from tests.flow_fakes import flow_recipe

COSTS = Costs(
    decode_step_s=1.0,
    row_s=0.25,
    cached_token_s=0.0,
    prefill_token_s=0.5,
    max_rows=2,
    train_token_s=0.0,
    train_pair_s=0.0,
    trajectory_s=0.0,
    publish_s=0.0,
    load_s=0.0,
)
LENGTHS = assumed_lengths(1000, prompt_tokens=10.0)


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
        (found,) = await group
        ended = asyncio.get_running_loop().time()
        await arrived
        assert generator.version == 3
        return found, ended

    assert run_in_virtual_time(main()) == (spans, pytest.approx(seconds))


def test_a_completion_that_begins_after_new_weights_has_one_version() -> None:
    async def main() -> object:
        generator = VirtualGenerator(COSTS)
        for version in (1, 2):
            generator.load(version)
        return await generator.complete([5])

    assert run_in_virtual_time(main()) == [(VersionSpan(2, 5),)]


def recipe_of(eta: int, *, schedule: str = "async", generators: int = 4) -> Recipe:
    recipe = flow_recipe(num_steps=30, max_staleness=eta, batch_size=256, group_size=2)
    recipe = recipe.model_copy(update={"schedule": schedule})
    return with_cluster(recipe, num_generators=generators)


def decoding(**changes: float) -> Costs:
    """Return costs of which a generator's are most of a step."""
    costs = replace(COSTS, decode_step_s=0.01, row_s=1e-4, prefill_token_s=1e-6, max_rows=128)
    return replace(costs, trajectory_s=0.01, **changes)


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_closed_form_has_the_step_of_a_simulated_run(eta: int) -> None:
    recipe, costs = recipe_of(eta), decoding(publish_s=0.2, load_s=0.1)
    predicted = steady_state(recipe, costs, LENGTHS)
    found = simulate(recipe, costs, LENGTHS, num_skipped=14)
    assert predicted.step_s == pytest.approx(found.step_s, rel=0.2)
    assert 0.3 < found.staleness_mean <= eta


def test_a_barrier_takes_generation_of_a_batch_and_training_one_after_the_other() -> None:
    recipe, costs = recipe_of(0, schedule="sync"), decoding(publish_s=0.2, load_s=0.1)
    predicted = steady_state(recipe, costs, LENGTHS)
    found = simulate(recipe, costs, LENGTHS, num_skipped=5)
    assert found.step_s == pytest.approx(predicted.step_s, rel=0.1)
    assert found.staleness_mean == 0.0


def test_a_batch_of_equal_completions_takes_the_sum_of_its_steps() -> None:
    equal = recorded_lengths([0], [100] * 64, source="by hand")
    costs = replace(COSTS, cached_token_s=0.01, max_rows=8)
    by_hand = 100 * (1 + 8 * 0.25) + 0.01 * 8 * 100**2 / 2
    assert batch_generation_s(costs, equal, 8, 64) == pytest.approx(by_hand, rel=0.01)


def test_slow_generators_failures_and_slow_loads_cost_what_they_take_away() -> None:
    recipe, costs = recipe_of(2), decoding()

    def speed(**troubles: Any) -> float:
        return simulate(
            recipe, costs, LENGTHS, num_skipped=14, troubles=Troubles(**troubles)
        ).trained_tokens_per_s

    whole = speed()
    assert speed(speeds=(1.0, 0.5)) == pytest.approx(0.75 * whole, rel=0.12)
    assert speed(failures_per_hour=12.0, restart_s=60.0) < whole
    late = simulate(
        recipe, costs, LENGTHS, num_skipped=14, troubles=Troubles(slow_load_s=lambda g: 5.0)
    )
    soon = simulate(recipe, costs, LENGTHS, num_skipped=14)
    assert late.staleness_mean > soon.staleness_mean


def test_failed_groups_run_again_and_no_token_is_lost() -> None:
    found = simulate(
        recipe_of(2),
        decoding(),
        LENGTHS,
        num_skipped=5,
        troubles=Troubles(failures_per_hour=30.0, restart_s=5.0),
    )
    assert found.num_failures > 2
    assert sum(found.staleness.values()) == pytest.approx(1.0)


def test_scoring_may_be_the_slowest_part() -> None:
    found = simulate(recipe_of(2), decoding(reward_s=0.1), LENGTHS, num_skipped=10)
    assert found.step_s == pytest.approx(256 * 0.1, rel=0.05)


def test_assumed_lengths_have_the_stated_mean_and_cut() -> None:
    lengths = assumed_lengths(27_648)
    assert lengths.mean == pytest.approx(9_276, rel=0.001)
    assert lengths.completion_tokens.max() == 27_648
    assert 0.05 < np.mean(lengths.completion_tokens == 27_648) < 0.1


def test_token_and_group_means_are_those_of_draws() -> None:
    lengths: Lengths = recorded_lengths([2, 4], [1, 3], source="by hand")
    assert lengths.decoding_tokens == 3 + (1 + 9) / 2 / 2 / 2
    assert lengths.mean_longest_of(2) == 0.25 * 1 + 0.75 * 3
    assert [lengths.of_seed(seed) for seed in (0, 1, 2)] == [1, 3, 1]
