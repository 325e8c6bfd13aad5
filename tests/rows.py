"""Scored groups as tables, and commits of them by tests that need no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from areal_flow.core.types import (
    Completion,
    EngineStats,
    Episode,
    GroupReceipt,
    Prompt,
    Score,
    VersionSpan,
    as_tokens,
)
from areal_flow.log.codec import receipts, rollout_rows, scored_table
from areal_flow.log.ledger_row import group_seeds
from areal_flow.log.run_log import RunLog
from areal_flow.log.trajectories import write_groups
from areal_flow.rollout.workflows.episode import RolledOutGroup, TrajectoryDraft
from pipelines.tiny_jobs.sums import ANSWER_MARK

Result = TypeVar("Result")


def group_table(
    index: int,
    *,
    version: int = 0,
    rewards: Sequence[float | None] = (1.0, 0.0),
    length: int = 3,
    writer_epoch: int = 1,
    error: str = "raised",
) -> pa.Table:
    """Return one scored group's rows."""
    prompt = Prompt(f"prompt-{index}", f"{index} =", str(index), 2, as_tokens([4, 5]))
    seeds = group_seeds(0, index, len(rewards))
    episode = Episode(index, prompt, seeds, 0, writer_epoch, datetime.now(UTC))
    logprobs = np.full(length, -0.5, np.float32)
    spans = (VersionSpan(version, length),)
    completion = Completion(as_tokens([7] * length), logprobs, spans, "stop")
    draft = TrajectoryDraft(prompt.tokens).with_completion(completion)
    group = RolledOutGroup(tuple((member, draft) for member in range(len(rewards))))
    scores = [
        Score(reward, "correct") if reward is not None else Score(None, "error", error=error)
        for reward in rewards
    ]
    table, _ = rollout_rows(
        [(episode, group)],
        generator="g-0",
        started_at=datetime.now(UTC),
        engine_stats=EngineStats(),
    )
    return scored_table(table, scores, verifier="numeric@0")


def written_group(path: Path, index: int, **arguments: object) -> GroupReceipt:
    """Write a group's fragments, uncommitted."""
    table = group_table(index, **arguments)  # type: ignore[arg-type]
    return GroupReceipt(index, write_groups(path, table), receipts(table))


def commit(log: RunLog, *groups: GroupReceipt) -> int:
    return _run(log.commit(groups))


def append(log: RunLog, *rows: dict[str, Any]) -> None:
    for row in rows:
        _run(log.append(row))


def _run(write: Coroutine[Any, Any, Result]) -> Result:
    """Run in a thread of its own, since the caller's may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, write).result()


def is_chain_of_thought(completion: str) -> bool:
    """Return whether a completion shows steps before its answer."""
    return bool(completion.split(ANSWER_MARK)[0].strip())
