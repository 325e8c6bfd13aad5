"""Episodes, completions and scores in, trajectory rows out; rows in, receipts out. No Lance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.types import (
    Completion,
    Episode,
    Score,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
)
from schemas import TrajectoryRow, arrow_schema, content_hashes
from schemas.trajectories import SCHEMA_VERSION

TRAJECTORIES = arrow_schema(TrajectoryRow)

RECEIPT_COLUMNS = ("trajectory_id", "version_spans", "reward", "finish_reason")
"""All that `receipts` needs to be read."""

_SCORED = ("reward", "reward_detail", "verifier", "scored_at", "content_hash")


def rollout_table(
    episode: Episode, completions: Sequence[Completion], *, generator: str, started_at: datetime
) -> pa.Table:
    """Return a group's rows as the generator knows them: everything but the score."""
    finished_at = datetime.now(UTC)
    prompt = episode.prompt
    rows = [
        {
            "trajectory_id": trajectory_id(episode.submission_index, member),
            "group_id": episode.group_id,
            "submission_index": episode.submission_index,
            "member": member,
            "attempt": episode.attempt,
            "seed": episode.seeds[member],
            "writer_epoch": episode.writer_epoch,
            "prompt_id": prompt.prompt_id,
            "difficulty": prompt.difficulty,
            "prompt_tokens": prompt.tokens,
            "output_tokens": completion.tokens,
            "behavior_logprobs": completion.logprobs,
            "loss_mask": [True] * len(completion.tokens),
            "version_spans": [span._asdict() for span in completion.version_spans],
            "finish_reason": completion.finish_reason,
            "generator": generator,
            "submitted_at": episode.submitted_at,
            "started_at": started_at,
            "finished_at": finished_at,
            "schema_version": SCHEMA_VERSION,
        }
        for member, completion in enumerate(completions)
    ]
    unscored = pa.schema([field for field in TRAJECTORIES if field.name not in _SCORED])
    return pa.Table.from_pylist(rows, schema=unscored)


def scored_table(table: pa.Table, scores: Sequence[Score], *, verifier: str) -> pa.Table:
    """Return the rows with their scores, columns in the schema's order."""
    scored_at = datetime.now(UTC)
    columns = {
        "reward": [score.reward for score in scores],
        "reward_detail": [_detail(score) for score in scores],
        "verifier": [verifier] * len(scores),
        "scored_at": [scored_at] * len(scores),
    }
    for name, values in columns.items():
        field = TRAJECTORIES.field(name)
        table = table.append_column(field, pa.array(values, field.type))
    table = table.append_column(
        TRAJECTORIES.field("content_hash"), pa.array(content_hashes(table), pa.string())
    )
    return table.select(TRAJECTORIES.names).cast(TRAJECTORIES)


def _detail(score: Score) -> str:
    fields = {key: value for key, value in asdict(score).items() if value not in ("", None)}
    return json.dumps({key: value for key, value in fields.items() if key != "reward"})


def receipts(table: pa.Table) -> tuple[TrajectoryReceipt, ...]:
    """Return what the driver may know of these rows: no tokens."""
    return tuple(
        TrajectoryReceipt(
            trajectory_id=row["trajectory_id"],
            version_spans=tuple(
                VersionSpan(span["version"], span["length"]) for span in row["version_spans"]
            ),
            reward=row["reward"],
            finish_reason=row["finish_reason"],
        )
        for row in table.select(RECEIPT_COLUMNS).to_pylist()
    )


def member_errors(table: pa.Table) -> tuple[str, ...]:
    """Return the root cause of each row that its verifier could not score."""
    failed = table.filter(pc.is_null(table["reward"]))["reward_detail"].to_pylist()
    return tuple(json.loads(detail).get("error", "unknown") for detail in failed)
