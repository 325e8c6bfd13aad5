"""The index of a run's trajectories: all of them without their tokens, and what became of each.

What became of a settled trajectory is final. So with each checkpoint the driver appends those that
were settled since the last one to Parquet files, which are merged as they grow and never changed; a
query adds the later ones. Without an index, all are later ones: it saves time, and holds nothing
that the logs do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import LanceFragment

from areal_flow.config import load_recipe
from areal_flow.core.durable import force_to_disk, replace_file_durably
from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout
from areal_flow.log.codec import TRAJECTORIES
from areal_flow.log.database import (
    LEDGER_COLUMNS,
    connect,
    consumption_table,
    empty_database,
    parquet_files,
    quoted,
)
from areal_flow.log.dataset import (
    COMMIT_ORDER,
    conjunction,
    fence_condition,
    newest_fragments,
    open_dataset,
)
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.settled import (
    NOTHING_SETTLED,
    SettledPast,
    past_from_json,
    read_trajectories,
)

VERSION = 1
"""Of what the files hold; those of another are not read."""
_NOT_READ = ("prompt_tokens", "output_tokens", "behavior_logprobs", "content_hash", "seed")
_READ = [*(name for name in TRAJECTORIES.names if name not in _NOT_READ), COMMIT_ORDER]
LEFT_OUT = (*_NOT_READ, "loss_mask", "prompt", "completion", "token_versions", "reward_detail")
"""Columns of the view `trajectories` that the index does not have."""
INDEXED = f"SELECT * EXCLUDE ({', '.join(LEFT_OUT)}) FROM trajectories"
ROWS_AT_ONCE = 1 << 16
MAX_MERGED_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Index:
    past: SettledPast = NOTHING_SETTLED
    """The files have all visible trajectories below its watermark."""
    parts: tuple[str, ...] = ()
    """Names of the files, oldest first: lowest commit order, number of rows, writer epoch."""


def read_index(layout: RunLayout) -> Index:
    """Return the index that was recorded; the empty one if it is not of the logs as they are."""
    try:
        record = json.loads(layout.index_parts.read_text())
        index = Index(past_from_json(record["past"]), tuple(record["parts"]))
        num_trajectories = open_dataset(layout.trajectories).count_rows()
        if (
            record["version"] == VERSION
            and all((layout.index / part).is_file() for part in index.parts)
            and index.past.is_of(LedgerReader(layout), num_trajectories=num_trajectories)
        ):
            return index
    except (OSError, ValueError, TypeError, KeyError, ArealFlowError):
        pass
    return Index()


def index_tables(layout: RunLayout, past: SettledPast) -> dict[str, pa.Table]:
    """Return the later trajectories without tokens, and what became of them."""
    rows = _without_tokens(read_trajectories(layout, past, _READ))
    steps = LedgerReader(layout).table(list(LEDGER_COLUMNS), since=past.ledger_since)
    return {"stored": rows, "consumption": consumption_table(steps, rows)}


def extend_index(layout: RunLayout, past: SettledPast, *, writer_epoch: int) -> None:
    """Add the trajectories that are settled by now. For the driver that holds the run."""
    before = read_index(layout)
    if past.watermark == before.past.watermark:
        return
    layout.index.mkdir(exist_ok=True)
    parts = list(before.parts)
    for part in _new_parts(layout, before.past, past, writer_epoch):
        parts.append(part)
        if (num := _num_to_merge(parts)) > 1:
            parts[-num:] = [_merge(layout, parts[-num:], writer_epoch)]
    force_to_disk(layout.index)
    record = {"version": VERSION, "past": asdict(past), "parts": parts}
    replace_file_durably(layout.index_parts, json.dumps(record) + "\n")
    for file in layout.index.glob("*.parquet"):
        if file.name not in {*parts, *before.parts}:  # a query may still read the former ones
            file.unlink()


def _new_parts(
    layout: RunLayout, before: SettledPast, past: SettledPast, writer_epoch: int
) -> Iterator[str]:
    recipe = load_recipe(layout.config)
    dataset = open_dataset(layout.trajectories)
    steps = LedgerReader(layout).table(list(LEDGER_COLUMNS), since=before.ledger_since)
    steps = steps.filter(pc.less_equal(steps["step"], past.step))
    later, num_later = f"{COMMIT_ORDER} >= {before.watermark}", dataset.count_rows()
    fragments = newest_fragments(dataset, later, num_rows=num_later - before.watermark)
    settled = f"{COMMIT_ORDER} < {past.watermark}"
    new = conjunction(later, settled, fence_condition(layout, "trajectories"))
    for portion in _portions(fragments):
        rows = dataset.scanner(_READ, filter=new, fragments=portion).to_table()
        stored = _without_tokens(rows)
        if not len(stored):
            continue
        connection = connect(
            {"stored": stored, "consumption": consumption_table(steps, stored)},
            decode=_has_no_text,
            max_staleness=recipe.controller.max_staleness,
            pass_threshold=recipe.pass_threshold,
        )
        name = _part_name(stored["commit_order"][0].as_py(), len(stored), writer_epoch)
        with connection:
            _write(connection, INDEXED, layout, name)
        yield name


def _portions(fragments: list[LanceFragment]) -> Iterator[list[LanceFragment]]:
    portion, num_rows = list[LanceFragment](), 0
    for fragment in fragments:
        if num_rows >= ROWS_AT_ONCE:
            yield portion
            portion, num_rows = [], 0
        portion.append(fragment)
        num_rows += fragment.metadata.num_rows
    yield portion


def _without_tokens(rows: pa.Table) -> pa.Table:
    """Return rows by commit order, with empty tokens."""
    for name in _NOT_READ:
        rows = rows.append_column(name, pa.nulls(len(rows), TRAJECTORIES.field(name).type))
    return rows.rename_columns({COMMIT_ORDER: "commit_order"}).sort_by("commit_order")


def _has_no_text(tokens: pa.Array) -> NoReturn:
    raise AssertionError("the index has no column of text")


def _num_to_merge(parts: list[str]) -> int:
    """Return how many of the last parts to merge: each is merged a logarithmic number of times."""
    sizes = [_num_rows(part) for part in parts]
    total, num = sizes[-1], 1
    for size in reversed(sizes[:-1]):
        if size > total or size + total > MAX_MERGED_ROWS:
            break
        total, num = total + size, num + 1
    return num


def _merge(layout: RunLayout, parts: list[str], writer_epoch: int) -> str:
    name = _part_name(_numbers(parts[0])[0], sum(map(_num_rows, parts)), writer_epoch)
    with empty_database() as connection:
        files = parquet_files(connection, [layout.index / part for part in parts])
        _write(connection, f"FROM {files}", layout, name)
    return name


def _write(connection: duckdb.DuckDBPyConnection, query: str, layout: RunLayout, name: str) -> None:
    file = layout.index / name
    connection.execute(
        f"COPY ({query}) TO {quoted(file)} (FORMAT parquet, COMPRESSION zstd, "
        f"ROW_GROUP_SIZE {ROWS_AT_ONCE})"
    )
    force_to_disk(file)


def _part_name(first: int, num_rows: int, writer_epoch: int) -> str:
    return f"{first}-{num_rows}-{writer_epoch}.parquet"


def _numbers(part: str) -> list[int]:
    return [int(number) for number in part.removesuffix(".parquet").split("-")]


def _num_rows(part: str) -> int:
    return _numbers(part)[1]
