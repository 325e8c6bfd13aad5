"""Score rows of JSONL with a verifier, as a reward worker would, to try it before training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from areal_flow.core.pass_rates import PASS_THRESHOLD, verdict_of
from areal_flow.core.types import Score
from areal_flow.rewards.protocol import Reward, RewardInput
from areal_flow.rewards.registry import load_reward
from areal_flow.rollout.prompts.rows import messages_in

BATCH_ROWS = 256
BATCH_CHARS = 2**24
"""A batch ends beyond this many characters: one completion may have a hundred million."""
MAX_LINE_CHARS = 2**28
"""The rest of a longer line is not read, so it is an invalid row."""
Row = dict[str, Any]


def verify_lines(
    kind: str, lines: Iterable[str], *, settings: Mapping[str, Any] | None = None
) -> Iterator[Row]:
    """Yield a verdict per line, in order, also for an invalid row."""
    reward = load_reward(kind, Path(), settings=settings).reward
    reward.open()
    try:
        for batch in _batches(enumerate(lines, 1)):
            yield from asyncio.run(_judge(reward, batch))
    finally:
        reward.close()


def read_lines(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a stream, each cut at `MAX_LINE_CHARS`."""
    while line := stream.readline(MAX_LINE_CHARS):
        yield line
        while line and not line.endswith("\n"):
            line = stream.readline(MAX_LINE_CHARS)


def _batches(numbered: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch, num_chars = list[tuple[int, str]](), 0
    for number, line in numbered:
        batch.append((number, line))
        num_chars += len(line)
        if len(batch) == BATCH_ROWS or num_chars > BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


async def _judge(reward: Reward, lines: Iterable[tuple[int, str]]) -> list[Row]:
    return await asyncio.gather(*(_judge_line(reward, number, line) for number, line in lines))


async def _judge_line(reward: Reward, number: int, line: str) -> Row:
    began, name = perf_counter(), None
    try:
        row = json.loads(line)
        name = row.get("id")
        given = _input_of(row)
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        score = Score(0.0, "bad_reference", error=f"line {number} is no row: {error!r:.200}")
    else:
        try:
            (score,) = await reward.score([given])
        except Exception as error:  # noqa: BLE001 - a failure of one row
            score = Score(None, "error", error=f"{type(error).__name__}: {error}")
    return {
        "id": name,
        "verdict": score.verdict or _verdict(score),
        "score": score.reward,
        "detail": score.error or score.message or score.extracted,
        "seconds": round(perf_counter() - began, 4),
    }


def _input_of(row: Row) -> RewardInput:
    """Return a row as a verifier gets it; its right answer is `reference`, or else `answer`."""
    completion = row["completion"]
    if not isinstance(completion, str):
        raise ValueError(f"completion: expected text, found {completion!r:.40}")
    answer = row.get("reference", row.get("answer", ""))
    messages = messages_in(row, "prompt")
    return RewardInput(str(row.get("prompt", "")), completion, answer, row, messages=messages)


def _verdict(score: Score) -> str:
    assert score.reward is not None  # a score without a verdict is a bare number
    return verdict_of(score.reward, threshold=PASS_THRESHOLD)
