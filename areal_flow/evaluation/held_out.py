"""Held-out prompts through the run's own workflow and rewards: an evaluation is a rollout.

Each prompt is a group of one member, with a seed that no training episode has. It refuses to know
which cluster answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import pyarrow as pa

from areal_flow.controller.records import member_seed
from areal_flow.store.codec import rollout_notes
from areal_flow.types import Episode, Prompt

PROMPTS_PER_TASK = 64
HELD_OUT_MEMBER = -1
"""Stands for the member in the seed: training's members count from 0."""


class Answers(Protocol):
    """Rolls out and scores without writing; `DaskRollouts` is one."""

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        """Return the scored rows of some groups."""
        ...


async def answer_held_out(
    answers: Answers,
    prompts: Sequence[Prompt],
    *,
    name: str,
    seed: int,
    writer_epoch: int,
    decode: Callable[[list[list[int]]], list[str]],
) -> list[dict[str, Any]]:
    """Answer every prompt once with the newest weights; return rows of the evaluation schema.

    Args:
        name: of the evaluation; the rows carry it.
        seed: of the run.
        writer_epoch: of the driver that will append the rows, 0 if none will.
        decode: turns lists of tokens into texts.

    Raises:
        ArealFlowError: the prompts could not be answered.
    """
    began = datetime.now(UTC)
    episodes = [
        Episode(index, prompt, (member_seed(seed, index, HELD_OUT_MEMBER),), 0, writer_epoch, began)
        for index, prompt in enumerate(prompts)
    ]
    tasks = [
        episodes[start : start + PROMPTS_PER_TASK]
        for start in range(0, len(episodes), PROMPTS_PER_TASK)
    ]
    tables = await asyncio.gather(*(answers.answer(task, name=name) for task in tasks))
    return [
        {"evaluation": name, "writer_epoch": writer_epoch, **row}
        for task, table in zip(tasks, tables, strict=True)
        for row in _rows(task, table, decode)
    ]


def _rows(
    episodes: Sequence[Episode], table: pa.Table, decode: Callable[[list[list[int]]], list[str]]
) -> list[dict[str, Any]]:
    """Return one row a prompt: its answer, or that it has none. Only branch 0 is the answer."""
    rows = [row for row in table.to_pylist() if row["branch"] == 0]
    texts = decode([row["output_tokens"] for row in rows])
    answered = {
        row["submission_index"]: _answer(row, text) for row, text in zip(rows, texts, strict=True)
    }
    failed = json.dumps({"verdict": "error", "error": "; ".join(rollout_notes(table).errors)})
    unanswered: dict[str, Any] = {
        "policy_version": max(row["version_spans"][-1]["version"] for row in rows),
        "completion": "",
        "num_output_tokens": 0,
        "finish_reason": "error",
        "reward": None,
        "reward_detail": failed,
    }
    return [
        {
            "prompt_id": episode.prompt.prompt_id,
            "difficulty": episode.prompt.difficulty,
            "prompt": episode.prompt.text,
            "answer": episode.prompt.answer,
            "evaluated_at": datetime.now(UTC),
            **answered.get(episode.submission_index, unanswered),
        }
        for episode in episodes
    ]


def _answer(row: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "policy_version": row["version_spans"][-1]["version"],
        "completion": text,
        "num_output_tokens": len(row["output_tokens"]),
        "finish_reason": row["finish_reason"],
        "reward": row["reward"],
        "reward_detail": row["reward_detail"],
    }
