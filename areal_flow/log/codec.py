"""Trajectory rows: made of episodes, scored, read as receipts and as arrays, hashed. No Lance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from areal_flow.core.digests import framed_hash
from areal_flow.core.layout import SCHEMA_VERSION
from areal_flow.core.types import (
    EngineStats,
    Episode,
    Prompt,
    Score,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
)
from areal_flow.rollout.workflows.episode import RolledOutGroup
from schemas import TrajectoryRow, arrow_schema

TRAJECTORIES = arrow_schema(TrajectoryRow)

RECEIPT_COLUMNS = ("trajectory_id", "version_spans", "reward", "finish_reason")
"""All that `receipts` needs to be read."""

CONTENT_COLUMNS = (
    "trajectory_id",
    "prompt_tokens",
    "output_tokens",
    "behavior_logprobs",
    "loss_mask",
    "version_spans",
    "reward",
)
"""What `content_hash` covers: all that a step depends on."""

DROPPED_COLUMNS = ("output_tokens", "behavior_logprobs")
"""What a row of an old step may lose: see `areal_flow.log.retention`."""

_NOTHING = pa.scalar(b"", pa.large_binary())

_TOKEN_COLUMNS = ("loss_mask", "prompt_tokens", "output_tokens", "behavior_logprobs")
"""Of a draft and of its row, alike. The mask comes first: it takes bytes before it takes bits."""


@dataclass(frozen=True, slots=True)
class RolloutNotes:
    """What is known of generated rows beside their columns."""

    prompts: Mapping[int, Prompt]
    """By submission index."""
    engine_stats: EngineStats
    scores: tuple[Score | None, ...]
    """Of each row: what its workflow has given already, or its failure."""


RolloutRows = tuple[pa.Table, RolloutNotes]
"""Rows without scores. A plain tuple, the table first: Dask then sends the table without a copy."""


def rollout_rows(
    groups: Sequence[tuple[Episode, RolledOutGroup]],
    *,
    generator: str,
    started_at: datetime,
    engine_stats: EngineStats,
) -> RolloutRows:
    """Return the groups' rows, all columns but the scores."""
    finished_at = datetime.now(UTC)
    rows = [
        {
            "trajectory_id": trajectory_id(episode.submission_index, member, draft.branch),
            "group_id": episode.group_id,
            "submission_index": episode.submission_index,
            "member": member,
            "branch": draft.branch,
            "attempt": episode.attempt,
            "seed": episode.seeds[member],
            "writer_epoch": episode.writer_epoch,
            "prompt_id": episode.prompt.prompt_id,
            "source": episode.prompt.source,
            "difficulty": episode.prompt.difficulty,
            "version_spans": [span._asdict() for span in draft.version_spans],
            "finish_reason": draft.finish_reason,
            "tool_calls": [call._asdict() for call in draft.tool_calls],
            "generator": generator,
            "submitted_at": episode.submitted_at,
            "started_at": started_at,
            "finished_at": finished_at,
            "schema_version": SCHEMA_VERSION,
        }
        for episode, group in groups
        for member, draft in group.drafts
    ]
    drafts = [draft for _, group in groups for _, draft in group.drafts]
    notes = RolloutNotes(
        {episode.submission_index: episode.prompt for episode, _ in groups},
        engine_stats,
        scores=tuple(draft.score for draft in drafts),
    )
    table = pa.Table.from_pylist(rows, pa.schema([TRAJECTORIES.field(name) for name in rows[0]]))
    for name in _TOKEN_COLUMNS:
        column = _ragged([getattr(draft, name) for draft in drafts], TRAJECTORIES.field(name).type)
        table = table.append_column(TRAJECTORIES.field(name), column)
    return table, notes


def _ragged(rows: Sequence[np.ndarray], of: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows), of.value_type), of)


def scored_table(table: pa.Table, scores: Sequence[Score], *, verifier: str) -> pa.Table:
    """Return the rows with their scores, columns in the schema's order."""
    scored_at = datetime.now(UTC)
    columns = {
        "reward": [score.reward for score in scores],
        "reward_detail": [_detail(score) for score in scores],
        "reward_parts": [[part._asdict() for part in score.parts] for score in scores],
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
    names = ("verdict", "extracted", "error", "message", "extra")
    detail = {name: value for name in names if (value := getattr(score, name))}
    text = json.dumps(detail, default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no JSON to a reader


def receipts(table: pa.Table) -> tuple[TrajectoryReceipt, ...]:
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


def array_rows(table: pa.Table) -> list[dict[str, Any]]:
    names = table.column_names  # made anew whenever it is asked for
    return [
        dict(zip(names, row, strict=True))
        for batch in table.to_batches()
        for row in zip(*map(_values_of_rows, names, batch.columns), strict=True)
    ]


def _values_of_rows(name: str, column: pa.Array) -> Iterable[Any]:
    if name == "version_spans":
        return _spans_of_rows(column)
    if name in _TOKEN_COLUMNS:
        return row_arrays(column)
    return column.to_pylist()  # type: ignore[no-any-return]


def _spans_of_rows(column: pa.ListArray) -> Iterator[tuple[VersionSpan, ...]]:
    spans = list(map(VersionSpan, *(field.to_pylist() for field in column.flatten().flatten())))
    offsets = column.offsets.to_numpy()
    for begin, end in pairwise((offsets - offsets[0]).tolist()):
        yield tuple(spans[begin:end])


def member_errors(table: pa.Table) -> tuple[str, ...]:
    failed = table.filter(pc.is_null(table["reward"]))["reward_detail"].to_pylist()
    return tuple(json.loads(detail).get("error", "unknown") for detail in failed)


def content_hashes(table: pa.Table) -> list[str]:
    """Return the `content_hash` of each row, 32 hexadecimal digits, from `CONTENT_COLUMNS`."""
    return [
        digest
        for batch in table.select(CONTENT_COLUMNS).to_batches()
        for digest in _row_hashes([*map(_bytes_of_rows, batch.columns)])
    ]


def _row_hashes(columns: Sequence[pa.LargeBinaryArray]) -> Iterator[str]:
    """Yield the hash of each row, whose parts Arrow joins, each behind its length."""
    num_rows, parts = len(columns[0]), []
    for column in columns:
        buffers = [None, pc.binary_length(column).buffers()[1]]
        lengths = pa.Array.from_buffers(pa.binary(8), num_rows, buffers).cast(pa.large_binary())
        parts += [lengths, column]
    _, offsets, content = pc.binary_join_element_wise(*parts, _NOTHING).buffers()
    bounds, joined = np.frombuffer(offsets, np.int64, num_rows + 1).tolist(), memoryview(content)
    return (framed_hash(joined[begin:end]) for begin, end in pairwise(bounds))


def is_dropped(table: pa.Table) -> pa.ChunkedArray:
    """Return, for each row, whether its tokens were dropped; a failed row never had any."""
    num_stored, num_sampled = map(
        pc.list_value_length, (table["output_tokens"], table["loss_mask"])
    )
    return pc.and_(pc.equal(num_stored, 0), pc.greater(num_sampled, 0))


def row_arrays(column: pa.ListArray | pa.ChunkedArray) -> Iterator[NDArray[Any]]:
    """Yield each row's values, of structs the fields side by side: views, but for booleans."""
    for chunk in getattr(column, "chunks", [column]):
        flat, offsets = _flat(chunk.flatten()), chunk.offsets.to_numpy()
        for begin, end in pairwise((offsets - offsets[0]).tolist()):
            yield flat[begin:end]


def _bytes_of_rows(column: pa.Array) -> pa.LargeBinaryArray:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    if not pa.types.is_nested(column.type):
        values = column.to_pylist()
        return pa.array(["" if value is None else repr(value) for value in values], "large_binary")
    flat, offsets = _flat(column.flatten()), column.offsets.to_numpy().astype(np.int64)
    bounds = (offsets - offsets[0]) * (flat.itemsize * math.prod(flat.shape[1:]))
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(flat))]
    return pa.Array.from_buffers(pa.large_binary(), len(column), buffers)


def _flat(values: pa.Array) -> NDArray[Any]:
    if pa.types.is_struct(values.type):
        return np.stack([_flat(field) for field in values.flatten()], axis=1)
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return flat
