"""How good a policy is on prompts that training never sees: its held-out answers.

Held-out prompts go through the run's own workflow and rewards, so an evaluation is a rollout: each
prompt is a group with a member a sample, and with seeds that no training episode has. This module
refuses to know which cluster answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.config import EvaluationSettings
from areal_flow.controller.records import member_seed
from areal_flow.held_out import HELD_OUT
from areal_flow.store.codec import rollout_notes
from areal_flow.types import Episode, Prompt, Tokens, answer_text
from schemas.content import row_arrays

ANSWERS_PER_TASK = 64
HELD_OUT_MEMBER = -1
"""Stands for the first sample in the seed, later ones count down: training's count from 0."""

_COPIED = ("version_spans", "finish_reason", "reward", "reward_detail", "verifier")

Decode = Callable[[Sequence[Tokens]], list[str]]
"""Turns sequences of tokens into texts."""
Answer = Callable[..., Awaitable[pa.Table]]
"""Rolls out and scores some groups without writing their rows; `DaskRollouts.answer` is one."""


async def answer_held_out(
    answer: Answer,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    name: str,
    seed: int,
    writer_epoch: int,
    decode: Decode,
) -> list[dict[str, Any]]:
    """Answer every prompt with the newest weights; return rows of the evaluation schema.

    Beside training, newer weights arrive while prompts are answered: no token is older than the
    evaluation's `policy_version`, and each row says which versions sampled it.

    Args:
        settings: how many answers a prompt of each set has, and how they are sampled.
        name: of the evaluation; the rows carry it.
        seed: of the run.
        writer_epoch: of the driver that will append the rows, 0 if none will.

    Raises:
        ArealFlowError: the prompts could not be answered.
    """
    began = datetime.now(UTC)
    episodes = [
        Episode(
            index,
            prompt,
            tuple(
                member_seed(seed, index, HELD_OUT_MEMBER - sample)
                for sample in range(settings.num_samples_of(_set_of(prompt)))
            ),
            0,
            writer_epoch,
            began,
            settings.sampling(),
        )
        for index, prompt in enumerate(prompts)
    ]
    tasks = _tasks(episodes)
    tables = await asyncio.gather(*(answer(task, name=name) for task in tasks))
    rows = [
        row for task, table in zip(tasks, tables, strict=True) for row in _rows(task, table, decode)
    ]
    oldest = min(span["version"] for row in rows for span in row["version_spans"])
    made = {"evaluation": name, "writer_epoch": writer_epoch, "policy_version": oldest}
    return [{**made, **row} for row in rows]


def _tasks(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Return the episodes in their order, as many together as have `ANSWERS_PER_TASK` answers."""
    tasks: list[list[Episode]] = []
    num_answers = ANSWERS_PER_TASK
    for episode in episodes:
        if num_answers + len(episode.seeds) > ANSWERS_PER_TASK:
            tasks.append([])
            num_answers = 0
        tasks[-1].append(episode)
        num_answers += len(episode.seeds)
    return tasks


def _set_of(prompt: Prompt) -> str:
    return prompt.source or HELD_OUT


def _rows(episodes: Sequence[Episode], table: pa.Table, decode: Decode) -> list[dict[str, Any]]:
    """Return one row a sample: its answer, or that it has none. Only branch 0 is the answer."""
    answers = table.filter(pc.equal(table["branch"], 0))
    rows = {
        (row["submission_index"], row["member"]): row
        for row in answers.select(["submission_index", "member", *_COPIED]).to_pylist()
    }
    texts = dict(zip(rows, decode([*row_arrays(answers["output_tokens"])]), strict=True))
    failed = {"verdict": "error", "error": "; ".join(rollout_notes(table).errors)}
    unanswered: dict[str, Any] = {
        "version_spans": [],
        "finish_reason": "error",
        "reward": None,
        "reward_detail": json.dumps(failed),
        "verifier": next(row["verifier"] for row in rows.values()),
    }
    return [
        {
            "held_out": _set_of(episode.prompt),
            "prompt_id": episode.prompt.prompt_id,
            "sample": sample,
            "difficulty": episode.prompt.difficulty,
            "prompt": episode.prompt.text,
            "answer": answer_text(episode.prompt.answer),
            "evaluated_at": datetime.now(UTC),
            "completion": texts.get((episode.submission_index, sample), ""),
            "num_output_tokens": sum(span["length"] for span in row["version_spans"]),
            **{name: row[name] for name in _COPIED},
        }
        for episode in episodes
        for sample in range(len(episode.seeds))
        for row in [rows.get((episode.submission_index, sample), unanswered)]
    ]
