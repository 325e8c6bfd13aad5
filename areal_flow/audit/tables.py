"""A stored table in, the rows as their schema wants them out, and what breaks it."""

from __future__ import annotations

from collections.abc import Iterator

import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.audit.findings import Finding
from schemas import arrow_schema, violations


def conform(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> pa.Table | None:
    """Return the schema's columns in its types; None where columns, types or values are missing.

    What is returned can be computed with; whether each row satisfies the model is another question.
    """
    schema = arrow_schema(model)
    if sorted(table.schema.names) != sorted(schema.names):
        return None
    try:
        cast = table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        return None
    return None if any(_has_holes(cast[field.name], field) for field in schema) else cast


def check_schema(
    table: pa.Table, model: type[pa_polars.DataFrameModel], *, where: str, advice: str
) -> Iterator[Finding]:
    """Yield one finding for each column and rule that the rows break."""
    expected = f"rows of {model.__name__}"
    wanted, found = set(arrow_schema(model).names), set(table.schema.names)
    if wanted != found:
        odd = ", ".join(sorted(wanted ^ found))
        yield Finding("schema", where, expected, f"missing or unknown columns: {odd}", advice)
        return
    for broken in violations(table, model):
        yield Finding("schema", where, expected, broken, advice)


def _has_holes(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    return pa.types.is_list(field.type) and bool(pc.list_flatten(column).null_count)
