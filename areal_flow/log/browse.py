"""Finds trajectories or groups of a run by a condition, and reads some of them in full.

Each reads only what it shows, since a log may have millions of rows. Ids come first: a condition
and an order read only the columns that they name. A condition on groups is evaluated without the
ledger where it names none of the ledger's columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from threading import Timer
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from areal_flow.algorithms.registry import AlgorithmSettings
from areal_flow.algorithms.staleness import trained_mask
from areal_flow.core.errors import ConfigError, RunError, TokensDropped
from areal_flow.core.types import VersionSpan, submission_index_of
from areal_flow.log.database import (
    allow_reading_only,
    empty_database,
    quoted,
    read_sql,
)
from areal_flow.log.dataset import fence_condition, open_dataset
from areal_flow.log.queries import Run
from areal_flow.log.trajectories import TrainingRows
from areal_flow.rollout.prompts.rows import messages_in, question_field

ROWS_PER_BATCH = 512
ORDERS = {
    "newest": "submission_index DESC",
    "oldest": "submission_index",
    "lowest reward": "avg(reward) NULLS LAST, submission_index",
    "most unequal rewards": "stddev_pop(reward) DESC NULLS LAST, submission_index",
}
MAX_GROUPS = 50
MAX_QUERY_S = 60
MAX_CHARACTERS = 200
"""Of a prompt in a list of groups."""


@dataclass(frozen=True, slots=True)
class Selection:
    """At most `limit` trajectories that satisfy `where`, by `sort` (nulls last) or by id."""

    where: str | None = None
    sort: str | None = None
    descending: bool = False
    limit: int | None = None


def select_trajectories(
    run: Run, selection: Selection, *, at: int | None = None
) -> tuple[list[str], int]:
    """Return the selected ids, in order, and how many trajectories match without the limit."""
    if at is None:
        with closing(run.indexed()) as index, suppress(duckdb.Error):  # explained below
            return _ids_and_count(index, "indexed", selection)
    with closing(run.database(at=at)) as database:
        columns = [name for name, *_ in database.sql("DESCRIBE trajectories").fetchall()]
        available = f"Columns are: {', '.join(sorted(columns))}"
        if selection.sort is not None and selection.sort not in columns:
            raise ConfigError(f"--sort {selection.sort}: no such column. {available}")
        try:
            return _ids_and_count(database, "trajectories", selection)
        except duckdb.Error as error:
            raise ConfigError(
                f"--where {selection.where!r} is no condition over trajectories: "
                f"{str(error).splitlines()[0]}\n{available}"
            ) from None


def _ids_and_count(
    database: duckdb.DuckDBPyConnection, view: str, selection: Selection
) -> tuple[list[str], int]:
    limit = "" if selection.limit is None else f"LIMIT {selection.limit}"
    direction = "DESC" if selection.descending else "ASC"
    order = f"trajectory_id {direction}"
    if selection.sort is not None:
        order = f'"{selection.sort}" {direction} NULLS LAST, trajectory_id'
    rows = database.sql(
        f"SELECT trajectory_id, count(*) OVER () FROM {view}\n"
        f"WHERE (\n{selection.where or 'TRUE'}\n) ORDER BY {order} {limit}"
    ).fetchall()
    return [identifier for identifier, _ in rows], rows[0][1] if rows else 0


def read_selected(
    database: duckdb.DuckDBPyConnection,
    identifiers: Sequence[str],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    names = "*" if columns is None else ", ".join(dict.fromkeys(["trajectory_id", *columns]))
    rows = database.sql(
        f"SELECT {names} FROM trajectories WHERE {_is_one_of(identifiers)}"
    ).to_arrow_table()
    order = pc.index_in(pa.array(identifiers, pa.string()), value_set=rows["trajectory_id"])
    return rows.take(order)


def selected_database(
    run: Run, identifiers: Sequence[str], *, at: int | None = None
) -> duckdb.DuckDBPyConnection:
    """Return a `Run.database` that has at least these trajectories."""
    few = at is None and len(identifiers) <= ROWS_PER_BATCH
    database: duckdb.DuckDBPyConnection = (
        run.selected(_is_one_of(identifiers)) if few else run.database(at=at)
    )
    return database


def _is_one_of(identifiers: Sequence[str]) -> str:
    return f"trajectory_id IN ({', '.join(map(quoted, identifiers)) or 'NULL'})"


def stream_rows(
    database: duckdb.DuckDBPyConnection, identifiers: Sequence[str]
) -> Iterator[pa.Table]:
    for start in range(0, len(identifiers), ROWS_PER_BATCH):
        yield read_selected(database, identifiers[start : start + ROWS_PER_BATCH])


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Groups with a trajectory that satisfies `where` and, if `step` is given, that it trained."""

    where: str | None = None
    step: int | None = None
    order: str = "newest"


def select_groups(run: Run, selection: GroupSelection) -> tuple[list[dict[str, Any]], int]:
    """Return the first selected groups, and how many match."""
    clauses = (
        f"WHERE {condition(run, selection)}\n"
        f"GROUP BY submission_index ORDER BY {ORDERS[selection.order]} LIMIT {MAX_GROUPS}"
    )
    try:
        selected, members = _first_groups(run, clauses)
    except duckdb.InterruptException:
        raise ConfigError(
            f"the condition {selection.where} takes longer than {MAX_QUERY_S} s: expected one that "
            "names fewer columns, or none of the ledger's"
        ) from None
    except duckdb.Error as error:
        raise ConfigError(
            f"expected an SQL condition, found {selection.where}: {str(error).splitlines()[0]}. "
            "Columns are those that `areal-flow trajectories --help` lists"
        ) from None
    with empty_database() as database:
        database.register("members", members)
        database.register("prompts", run.prompts())
        rows = database.sql(read_sql("groups")).to_arrow_table().to_pylist()
    plan = run.recipe.prompt_plan()
    for row in rows:
        metadata = json.loads(row.pop("metadata") or "{}")
        field = question_field(metadata, plan.rows_of(row.pop("source")).prompts)
        row["prompt"] = _question(metadata, field, row["prompt"])
    by_index = {row["group"]: row for row in rows}
    return [by_index[index] for index, _ in selected], selected[0][1] if selected else 0


def condition(run: Run, selection: GroupSelection) -> str:
    where = f"(\n{selection.where or 'TRUE'}\n)"
    if selection.step is None:
        return where
    step = run.steps("arrow", columns=["trajectory_ids"], where=f"step = {selection.step}")
    if not len(step):
        raise RunError(f"{run.layout.name} has no step {selection.step}")
    trained = set(map(submission_index_of, step["trajectory_ids"][0].as_py()))
    return f"{where} AND {_in_submissions(sorted(trained))}"


def _question(metadata: dict[str, Any], field: str, prompt: str) -> str:
    """Return the user's last message, or the question; the prompt where a row has neither."""
    questions = [m["content"] for m in messages_in(metadata, field) if m["role"] == "user"]
    text = questions[-1] if questions else metadata.get(field)
    return (text if isinstance(text, str) else prompt).replace("\n", " ")[:MAX_CHARACTERS]


def _first_groups(run: Run, clauses: str) -> tuple[list[Any], pa.Table]:
    """Return each selected submission index with the number of all that match, and the members."""
    select = "SELECT submission_index, count(*) OVER () FROM"
    with closing(run.indexed()) as index:
        try:
            selected = _read_only(index, f"{select} indexed\n{clauses}")
        except (duckdb.BinderException, duckdb.CatalogException):  # of a column with tokens
            selected = _of_all_columns(run, select, clauses)
        members = index.table("indexed").filter(_in_submissions([index for index, _ in selected]))
        return selected, members.to_arrow_table()


def _of_all_columns(run: Run, select: str, clauses: str) -> list[Any]:
    if fence_condition(run.layout, "trajectories") is None:
        log_alone = run.connect({"stored": open_dataset(run.layout.trajectories)})
        with closing(log_alone), suppress(duckdb.BinderException, duckdb.CatalogException):
            return _read_only(log_alone, f"{select} logged\n{clauses}")  # not of the ledger
    with closing(run.database()) as database:
        return _read_only(database, f"{select} trajectories\n{clauses}")


def _read_only(database: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    """Run a query that a user wrote a part of: read-only and at most `MAX_QUERY_S`."""
    allow_reading_only(database)
    if len(database.extract_statements(query)) != 1:
        raise duckdb.ParserException("several statements")
    timer = Timer(MAX_QUERY_S, database.interrupt)
    timer.start()
    try:
        rows: list[Any] = database.sql(query).fetchall()
    finally:
        timer.cancel()
    return rows


def _in_submissions(indices: Sequence[int]) -> str:
    return f"submission_index IN ({', '.join(map(str, indices)) or 'NULL'})"


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
    """None where it is of a critic's values or of a KL divergence, which only a replay computes, or
    of dropped tokens."""
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
    if which.isdecimal():
        identifiers, _ = select_trajectories(run, selection, at=at)
        if not 1 <= int(which) <= len(identifiers):
            raise ConfigError(
                f"--show {which}: expected a number from 1 to {len(identifiers)}, or an id"
            )
        which = identifiers[int(which) - 1]
    group = f"group_id IN (SELECT group_id FROM indexed WHERE trajectory_id = {quoted(which)})"
    with closing(run.selected(group) if at is None else run.database(at=at)) as database:
        return _show_rows(run, database, [run.find_row(database, which)])[0]


def show_group(run: Run, submission_index: int) -> list[ShownTrajectory]:
    """Read a group's members, with everything that can be shown without a model."""
    with closing(run.selected(_in_submissions([submission_index]))) as database:
        rows = database.sql("FROM trajectories ORDER BY trajectory_id").to_arrow_table().to_pylist()
        return _show_rows(run, database, rows)


def _show_rows(
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
    if not texts:  # a failure, or dropped tokens
        return ()
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
    """Return the batch that `row` was trained in, for each of its trajectories.

    Without advantages where they are of models that went with the step, or of dropped tokens.
    """
    from areal_flow.training.sequences import sequences_from_rows
    from areal_flow.training.step import compute_advantages

    columns = ["trajectory_ids", "committed_at", "trajectory_watermark"]
    step = run.steps("arrow", columns=columns, where=f"step = {row['step']}").to_pylist()[0]
    identifiers = step["trajectory_ids"]
    advantages: Sequence[Any] = [None] * len(identifiers)
    if not (algorithm.needs_critic or algorithm.needs_kl):
        bound = {"policy_version": row["policy_version"], "max_staleness": max_staleness}
        read = TrainingRows(run.layout, until=step["trajectory_watermark"])
        with suppress(TokensDropped):
            sequences = sequences_from_rows(read(identifiers), **bound)
            advantages = compute_advantages(sequences, algorithm)
    of = (algorithm.advantage, len(identifiers), step["committed_at"])
    return {each: TrainedBatch(a, *of) for each, a in zip(identifiers, advantages, strict=True)}
