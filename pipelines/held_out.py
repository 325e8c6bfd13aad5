"""Held-out prompts through a running cluster; graded answers and a table out."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from distributed import Client

from areal_flow.cluster import tasks
from areal_flow.cluster.results import result_of
from areal_flow.types import EvaluationTable, Prompt
from pipelines.intervals import wilson_interval

PROMPTS_PER_TASK = 64


async def answer_held_out(
    client: Client, prompts: Sequence[Prompt], *, name: str, seed: int, version: int
) -> list[dict[str, Any]]:
    """Answer every prompt once with `version`; return rows of the evaluation schema."""
    starts = range(0, len(prompts), PROMPTS_PER_TASK)
    graded = await asyncio.gather(
        *(
            _answer_part(
                client,
                prompts[start : start + PROMPTS_PER_TASK],
                first_index=start,
                name=name,
                seed=seed,
                version=version,
            )
            for start in starts
        )
    )
    return [row for part in graded for row in part]


async def _answer_part(
    client: Client,
    prompts: Sequence[Prompt],
    *,
    first_index: int,
    name: str,
    seed: int,
    version: int,
) -> list[dict[str, Any]]:
    answered = client.submit(
        tasks.answer,
        prompts,
        first_index,
        seed,
        version,
        pure=False,
        resources={"generator": 1},
    )
    graded = client.submit(
        tasks.grade, answered, prompts, name, pure=False, resources={"reward": 1}
    )
    rows: list[dict[str, Any]] = await result_of(graded)
    return rows


def tabulate(rows: Sequence[dict[str, Any]]) -> EvaluationTable:
    """Return the overall pass rate, and pass rate and mean length by difficulty."""
    by_difficulty: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_difficulty[row["difficulty"]].append(row)
    return EvaluationTable(
        overall=wilson_interval(_num_passed(rows), len(rows)),
        by_difficulty={
            difficulty: (
                wilson_interval(_num_passed(part), len(part)),
                sum(row["num_output_tokens"] for row in part) / len(part),
            )
            for difficulty, part in sorted(by_difficulty.items())
        },
    )


def _num_passed(rows: Sequence[dict[str, Any]]) -> int:
    return sum((row["reward"] or 0.0) > 0 for row in rows)
