"""Checks rows against a schema; the one error names the columns and never prints tokens."""

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
    if broken := violations(table, model):
        raise SchemaError(
            f"rows do not satisfy {model.__name__}: {'; '.join(broken)}. Nothing was written."
        )
    return table


def violations(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> list[str]:
    """Return each column and rule that rows fail, with how many do; never their values."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    try:
        model.validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        return _broken_rules(errors)
    return []


def _broken_rules(errors: pandera.errors.SchemaErrors) -> list[str]:
    failures: dict[tuple[str, str], int] = {}
    for error in errors.schema_errors:
        column = getattr(error.schema, "name", None) or "row"
        rule = str(getattr(error.check, "name", None) or error.check or error.reason_code)
        cases = error.failure_cases
        failures[(str(column), rule)] = len(cases) if isinstance(cases, pl.DataFrame) else 1
    return [f"{column}: {rule} ({n} rows)" for (column, rule), n in failures.items()]
