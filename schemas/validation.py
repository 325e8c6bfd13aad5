"""Rows in, the same rows out, or one error that names the columns and never prints tokens."""

from __future__ import annotations

import pandera.errors
import pandera.polars as pa_polars
import polars as pl
import pyarrow as pa

from areal_flow.errors import SchemaError


def validate(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> pa.Table:
    """Return `table` unchanged if every row satisfies `model`.

    Raises:
        SchemaError: naming each column and rule that failed, with how many rows failed it.
    """
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    try:
        model.validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        raise SchemaError(_explain(errors, model.__name__)) from None
    return table


def _explain(errors: pandera.errors.SchemaErrors, name: str) -> str:
    failures: dict[tuple[str, str], int] = {}
    for error in errors.schema_errors:
        column = getattr(error.schema, "name", None) or "row"
        rule = str(getattr(error.check, "name", None) or error.check or error.reason_code)
        cases = error.failure_cases
        failures[(str(column), rule)] = len(cases) if isinstance(cases, pl.DataFrame) else 1
    rules = "; ".join(f"{column}: {rule} ({n} rows)" for (column, rule), n in failures.items())
    return f"rows do not satisfy {name}: {rules}. Nothing was written."
