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
        settings: how many answers a prompt has, and how they are sampled.
        name: of the evaluation; the rows carry it.
        seed: of the run.
        writer_epoch: of the driver that will append the rows, 0 if none will.

    Raises:
        ArealFlowError: the prompts could not be answered.
    """
    began = datetime.now(UTC)
    members = range(HELD_OUT_MEMBER, HELD_OUT_MEMBER - settings.num_samples, -1)
    episodes = [
        Episode(
            index,
            prompt,
            tuple(member_seed(seed, index, member) for member in members),
            0,
            writer_epoch,
            began,
            settings.sampling(),
        )
        for index, prompt in enumerate(prompts)
    ]
    num_together = max(1, ANSWERS_PER_TASK // settings.num_samples)
    tasks = [
        episodes[start : start + num_together] for start in range(0, len(episodes), num_together)
    ]
    tables = await asyncio.gather(*(answer(task, name=name) for task in tasks))
    rows = [
        row for task, table in zip(tasks, tables, strict=True) for row in _rows(task, table, decode)
    ]
    oldest = min(span["version"] for row in rows for span in row["version_spans"])
    made = {"evaluation": name, "writer_epoch": writer_epoch, "policy_version": oldest}
    return [{**made, **row} for row in rows]


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
            "held_out": episode.prompt.source or HELD_OUT,
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
