"""Columns of the prompts' rows, as `metadata.NAME`, beside trajectories and evaluations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import RunError
from areal_flow.core.pass_rates import HELD_OUT

OF_ROW = "metadata."
"""What stands before the name of a column of a prompt's row."""
_IN_SQL = re.compile(rf"\b{re.escape(OF_ROW)}\w+")


def refuse_row_columns(where: str | None) -> None:
    if match := _IN_SQL.search(where or ""):
        raise RunError(
            f"where: {match[0]} is no stored column; expected it in `columns`, to filter the table "
            "by it then"
        )


def names_row_columns(columns: Sequence[str] | None) -> bool:
    return any(name.startswith(OF_ROW) for name in columns or ())


def with_row_columns(
    read: Callable[..., pa.Table], columns: Sequence[str], prompts: Path, *, source: str
) -> pa.Table:
    """Return what `read` gives with columns of the prompts' rows, null where a row lacks one.

    Args:
        source: the column that has the name of the prompt's source.
    """
    of_rows = [name for name in columns if name.startswith(OF_ROW)]
    table = read(columns=[*({*columns, source, "prompt_id"} - {*of_rows})])
    with pa.memory_map(str(prompts)) as file:
        prompt_rows = pa.ipc.open_file(file).read_all()
        places = pc.index_in(_keys(table, source), _keys(prompt_rows, "source")).to_pylist()
        rows = {at: json.loads(prompt_rows["metadata"][at].as_py()) for at in {*places} - {None}}
    for name in of_rows:
        values = {at: row.get(name.removeprefix(OF_ROW)) for at, row in rows.items()}
        table = table.append_column(name, _column([values.get(at) for at in places]))
    return table.select(columns)


def _keys(table: pa.Table, source: str) -> pa.Array:
    """Return what is unique in a run, also in one whose ids were unique in their source alone."""
    of_main_set = pc.equal(table[source], HELD_OUT)
    sources = pc.if_else(of_main_set, "", table[source])
    return pc.binary_join_element_wise(sources, table["prompt_id"], "\n").combine_chunks()


def _column(values: list[Any]) -> pa.Array:
    """Return values of JSON as a column: as text if they are of several types, or too large."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])
