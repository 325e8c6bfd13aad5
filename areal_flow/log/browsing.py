"""Finds trajectories of a run by a condition, and reads one of them in full.

Ids first, rows after: a condition and an order read only the columns that they name, and texts are
decoded for the rows that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from areal_flow.algorithms.registry import AlgorithmSettings
from areal_flow.algorithms.staleness import trained_mask
from areal_flow.core.errors import ConfigError
from areal_flow.core.types import VersionSpan
from areal_flow.log.queries import Run
from areal_flow.log.trajectories import TrainingRows

ROWS_PER_BATCH = 512
QUOTE = "'"


@dataclass(frozen=True, slots=True)
class Selection:
    """Trajectories that satisfy `where`, by `sort` (nulls last), else by id; at most `limit`."""

    where: str | None = None
    sort: str | None = None
    descending: bool = False
    limit: int | None = None


def select_trajectories(
    database: duckdb.DuckDBPyConnection, selection: Selection
) -> tuple[list[str], int]:
    """Return the selected ids, in order, and how many trajectories match without the limit."""
    columns = [name for name, *_ in database.sql("DESCRIBE trajectories").fetchall()]
    there_are = f"Columns are: {', '.join(sorted(columns))}"
    if selection.sort is not None and selection.sort not in columns:
        raise ConfigError(f"--sort {selection.sort}: no such column. {there_are}")
    limit = "" if selection.limit is None else f"LIMIT {selection.limit}"
    direction = "DESC" if selection.descending else "ASC"
    order = f"trajectory_id {direction}"
    if selection.sort is not None:
        order = f'"{selection.sort}" {direction} NULLS LAST, trajectory_id'
    try:
        rows = database.sql(
            f"SELECT trajectory_id, count(*) OVER () FROM trajectories\n"
            f"WHERE (\n{selection.where or 'TRUE'}\n) ORDER BY {order} {limit}"
        ).fetchall()
    except duckdb.Error as error:
        raise ConfigError(
            f"--where {selection.where!r} is no condition over trajectories: "
            f"{str(error).splitlines()[0]}\n{there_are}"
        ) from None
    return [identifier for identifier, _ in rows], rows[0][1] if rows else 0


def read_rows(
    database: duckdb.DuckDBPyConnection,
    identifiers: Sequence[str],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    names = "*" if columns is None else ", ".join(dict.fromkeys(["trajectory_id", *columns]))
    quoted = ", ".join(f"'{identifier.replace(QUOTE, QUOTE * 2)}'" for identifier in identifiers)
    rows = database.sql(
        f"SELECT {names} FROM trajectories WHERE trajectory_id IN ({quoted or 'NULL'})"
    ).to_arrow_table()
    order = pc.index_in(pa.array(identifiers, pa.string()), value_set=rows["trajectory_id"])
    return rows.take(order)


def stream_rows(
    database: duckdb.DuckDBPyConnection, identifiers: Sequence[str]
) -> Iterator[pa.Table]:
    for start in range(0, len(identifiers), ROWS_PER_BATCH):
        yield read_rows(database, identifiers[start : start + ROWS_PER_BATCH])


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of a completion; `staleness` is None while no step has trained it."""

    text: str
    token_id: int
    version: int
    logprob: float
    staleness: int | None
    trained: bool | None
    chosen: bool


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    advantage: float | None
    """None where it is of a critic's values or of a KL divergence, which only a replay computes."""
    advantage_rule: str
    num_trajectories: int
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """A trajectory with its tokens, its group and its step; `row` is of `Run.database`'s view."""

    run_name: str
    row: dict[str, Any]
    prompt: str
    """As the policy read it, special tokens included."""
    tokens: tuple[ShownToken, ...]
    answer: str | None
    group: tuple[tuple[str, float | None], ...]
    batch: TrainedBatch | None
    max_staleness: int


def show_trajectory(
    run: Run, which: str, *, selection: Selection, at: int | None = None
) -> ShownTrajectory:
    """Read one trajectory by its id or its number in the selection."""
    with closing(run.database(at=at)) as database:
        if which.isdecimal():
            identifiers, _ = select_trajectories(database, selection)
            if not 1 <= int(which) <= len(identifiers):
                raise ConfigError(
                    f"--show {which}: expected a number from 1 to {len(identifiers)}, or an id"
                )
            which = identifiers[int(which) - 1]
        return show_rows(run, database, [run.find_row(database, which)])[0]


def show_rows(
    run: Run, database: duckdb.DuckDBPyConnection, rows: Sequence[dict[str, Any]]
) -> list[ShownTrajectory]:
    """Return rows of one group, in a connection that has all of it, with what belongs to them."""
    group = database.sql(
        "SELECT trajectory_id, reward FROM trajectories WHERE group_id = ? ORDER BY 1",
        params=[rows[0]["group_id"]],
    ).fetchall()
    answers = database.sql(
        "SELECT answer FROM prompts WHERE source = ? AND prompt_id = ? LIMIT 1",
        params=[rows[0]["source"], rows[0]["prompt_id"]],
    ).fetchall()
    recipe, tokenizer = run.recipe, run.tokenizer
    max_staleness = recipe.controller.max_staleness
    batches: dict[str, TrainedBatch] = {}
    for row in {row["step"]: row for row in rows if row["status"] == "trained"}.values():
        batches |= _batches(run, row, recipe.algorithm, max_staleness)
    return [
        ShownTrajectory(
            run_name=run.layout.name,
            row=row,
            prompt=tokenizer.decode(row["prompt_tokens"], skip_special_tokens=False),
            tokens=_tokens(row, token_texts(tokenizer, row["output_tokens"]), max_staleness),
            answer=answers[0][0] if answers else None,
            group=tuple(group),
            batch=batches.get(row["trajectory_id"]),
            max_staleness=max_staleness,
        )
        for row in rows
    ]


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a part of a character comes with its last token."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def _tokens(
    row: dict[str, Any], texts: Sequence[str], max_staleness: int
) -> tuple[ShownToken, ...]:
    versions, chosen = row["token_versions"], row["loss_mask"]
    staleness: Sequence[int | None] = [None] * len(texts)
    trained: Sequence[bool | None] = [None] * len(texts)
    if row["status"] == "trained":
        at = row["policy_version"]
        staleness = [at - version for version in versions]
        spans = [VersionSpan(**span) for span in row["version_spans"]]
        bound = {"policy_version": at, "max_staleness": max_staleness}
        trained = trained_mask(spans, np.array(chosen, np.bool_), **bound).tolist()
    stored = row["output_tokens"], versions, row["behavior_logprobs"]
    columns = (texts, *stored, staleness, trained, chosen)
    return tuple(ShownToken(*token) for token in zip(*columns, strict=True))


def _batches(
    run: Run, row: dict[str, Any], algorithm: AlgorithmSettings, max_staleness: int
) -> dict[str, TrainedBatch]:
    """Return the batch that `row` was trained in, for each of its trajectories."""
    from areal_flow.training.sequences import sequences_from_rows
    from areal_flow.training.step import compute_advantages

    step = run.steps(
        "arrow", columns=["trajectory_ids", "committed_at"], where=f"step = {row['step']}"
    ).to_pylist()[0]
    identifiers = step["trajectory_ids"]
    advantages: Sequence[Any] = [None] * len(identifiers)
    if not (algorithm.needs_critic or algorithm.needs_kl):  # of models that went with the step
        bound = {"policy_version": row["policy_version"], "max_staleness": max_staleness}
        read = TrainingRows(run.layout)
        advantages = compute_advantages(sequences_from_rows(read(identifiers), **bound), algorithm)
    of = (algorithm.advantage, len(identifiers), step["committed_at"])
    return {each: TrainedBatch(a, *of) for each, a in zip(identifiers, advantages, strict=True)}
