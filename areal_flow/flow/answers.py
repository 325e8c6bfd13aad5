"""Answers held-out prompts, which training never sees.

Held-out prompts go through the run's own workflow and rewards, so an evaluation is a rollout: each
prompt is a group with one member per sample, and its seeds differ from those of all training
episodes. This module does not depend on the cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from areal_flow.config import EvaluationSettings
from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import EpisodeError
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.core.types import Episode, Prompt, Tokens, answer_text
from areal_flow.log.codec import row_arrays
from areal_flow.log.ledger_row import member_seed

logger = logging.getLogger(__name__)

ANSWERS_PER_TASK = 64
HELD_OUT_MEMBER = -1
"""Stands for the first sample in the seed, later ones count down: training's count from 0."""

_COPIED = ("version_spans", "finish_reason", "reward", "reward_detail", "verifier")

Decode = Callable[[Sequence[Tokens]], list[str]]
"""Turns sequences of tokens into texts."""
Answer = Callable[..., Coroutine[Any, Any, pa.Table]]
"""Rolls out and scores some groups without writing their rows, as `DaskRollouts.answer` does."""


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

    Newer weights may arrive meanwhile: `policy_version` is the oldest that sampled a token. An
    answer whose workflow or verifier failed is a row without a reward. `writer_epoch` is that of
    the driver that will append the rows; 0 if none will.
    """
    began, episodes = datetime.now(UTC), []
    for index, prompt in enumerate(prompts):
        samples = range(settings.num_samples_of(prompt.source or HELD_OUT))
        seeds = tuple(member_seed(seed, index, HELD_OUT_MEMBER - sample) for sample in samples)
        given = (index, prompt, seeds, 0, writer_epoch, began, settings.sampling())
        episodes.append(Episode(*given))
    tasks = _tasks(episodes)
    tables = await all_of(answer(task, name=name) for task in tasks)
    columns = {"evaluation": name, "writer_epoch": writer_epoch}
    return await asyncio.to_thread(_all_rows, tasks, tables, decode, columns)


def _tasks(episodes: Sequence[Episode]) -> list[list[Episode]]:
    tasks: list[list[Episode]] = []
    num_answers = ANSWERS_PER_TASK
    for episode in episodes:
        if num_answers + len(episode.seeds) > ANSWERS_PER_TASK:
            tasks.append([])
            num_answers = 0
        tasks[-1].append(episode)
        num_answers += len(episode.seeds)
    return tasks


def _all_rows(
    tasks: Sequence[Sequence[Episode]],
    tables: Sequence[pa.Table],
    decode: Decode,
    columns: Mapping[str, Any],
) -> list[dict[str, Any]]:
    answered = zip(tasks, tables, strict=True)
    rows = [row for task, table in answered for row in _rows(task, table, decode)]
    if failed := [json.loads(row["reward_detail"]) for row in rows if row["reward"] is None]:
        cause = failed[0].get("error", "no reason is known")
        if all(row["finish_reason"] == "error" for row in rows):
            raise EpisodeError(cause)
        logger.warning(
            "evaluation %s: %d of %d answers have no reward and count as not passed; the first: %s",
            *(columns["evaluation"], len(failed), len(rows), cause),
        )
    oldest = min(span["version"] for row in rows for span in row["version_spans"])
    return [{**columns, "policy_version": oldest, **row} for row in rows]


def _rows(episodes: Sequence[Episode], table: pa.Table, decode: Decode) -> Iterator[dict[str, Any]]:
    """Yield one row a sample: its first branch is the answer, or says why there is none."""
    table = table.sort_by("trajectory_id")
    members = table.select(["submission_index", "member"]).to_pylist()
    is_first = [member != before for member, before in zip(members, [None, *members], strict=False)]
    answers = table.filter(pa.array(is_first))
    texts = decode([*row_arrays(answers["output_tokens"])])
    samples = [(of, sample) for of in episodes for sample in range(len(of.seeds))]
    copied = answers.select(_COPIED).to_pylist()
    for (episode, sample), text, row in zip(samples, texts, copied, strict=True):
        yield {
            "held_out": episode.prompt.source or HELD_OUT,
            "prompt_id": episode.prompt.prompt_id,
            "sample": sample,
            "difficulty": episode.prompt.difficulty,
            "prompt": episode.prompt.text,
            "answer": answer_text(episode.prompt.answer),
            "evaluated_at": datetime.now(UTC),
            "completion": text,
            "num_output_tokens": sum(span["length"] for span in row["version_spans"]),
            **row,
        }
