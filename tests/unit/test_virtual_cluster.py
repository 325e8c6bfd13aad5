"""The generators of `benchmarks/scaling.py`: their time and versions, against sums by hand."""

from __future__ import annotations

import asyncio

import pytest

from areal_flow.types import VersionSpan
from benchmarks.virtual_cluster import Costs, Generator
from tests.unit.virtual_time import run_in_virtual_time

COSTS = Costs(decode_step_s=1.0, row_s=0.25, prefill_tokens_per_s=2.0)


def test_a_row_decodes_at_the_speed_that_the_rows_beside_it_leave() -> None:
    async def main() -> list[float]:
        generator, loop = Generator(COSTS, max_rows=2), asyncio.get_running_loop()
        ended: list[float] = []
        rows = [generator.complete(num_tokens) for num_tokens in (2, 6, 3)]
        for row in rows:
            row.add_done_callback(lambda _: ended.append(loop.time()))
        await asyncio.gather(*rows)
        return ended

    # Two rows at 1.5 s a step until the third has had its 3 steps, then one at 1.25 s.
    assert run_in_virtual_time(main()) == pytest.approx([2 * 1.5, 5 * 1.5, 5 * 1.5 + 1.25])


def test_new_weights_split_a_completion_and_have_its_prefix_computed_again() -> None:
    async def main() -> tuple[object, float]:
        generator = Generator(COSTS, max_rows=2)
        row = generator.complete(10)
        await asyncio.sleep(4 * 1.25)
        generator.load(3)
        return await row, asyncio.get_running_loop().time()

    spans, at = run_in_virtual_time(main())
    assert spans == (VersionSpan(0, 4), VersionSpan(3, 6))
    assert at == pytest.approx(10 * 1.25 + 4 / 2.0)


def test_a_completion_that_begins_after_new_weights_has_one_version() -> None:
    async def main() -> object:
        generator = Generator(COSTS, max_rows=1)
        for version in (1, 2):
            generator.load(version)
        return await generator.complete(5)

    assert run_in_virtual_time(main()) == (VersionSpan(2, 5),)
