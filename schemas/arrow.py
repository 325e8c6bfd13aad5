"""The Arrow schema of a pandera model, a table's check against it, and the type that pandera lacks.

The only place where the two type systems meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pandera.errors
import pandera.polars as pa_polars
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pandera.dtypes import immutable
from pandera.engines import polars_engine

from areal_flow.errors import SchemaError


@polars_engine.Engine.register_dtype(equivalents=[pl.Map])
@immutable(init=True)
class MapType(polars_engine.DataType):
    """A map column, which polars has and pandera 0.35 does not know."""

    type = pl.Map

    def __init__(self, key: Any = pl.String, value: Any = pl.Float64) -> None:
        object.__setattr__(self, "type", pl.Map(key, value))

    @classmethod
    def from_parametrized_dtype(cls, polars_dtype: pl.Map) -> Any:
        """Return the type of `pl.Map(key, value)`."""
        return cls(polars_dtype.key, polars_dtype.value)


def arrow_schema(model: type[pa_polars.DataFrameModel]) -> pa.Schema:
    """Return the Arrow schema of a pandera model, columns in the model's order.

    Polars speaks `large_*` types and drops metadata, so the store casts to this schema on write.
    """
    return _arrow_schema(model)  # type: ignore[arg-type] # mypy finds no hash in a class of Any


@cache
def _arrow_schema(model: type[pa_polars.DataFrameModel]) -> pa.Schema:
    columns = model.to_schema().columns
    empty = pl.DataFrame(schema={name: column.dtype.type for name, column in columns.items()})
    return pa.schema(
        [
            pa.field(field.name, _small(field.type), bool(columns[field.name].nullable))
            for field in empty.to_arrow().schema
        ]
    )


def _small(arrow_type: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type):
        return pa.string()
    if pa.types.is_large_list(arrow_type):
        return pa.list_(_small(arrow_type.value_type))
    if pa.types.is_map(arrow_type):
        return pa.map_(_small(arrow_type.key_type), _small(arrow_type.item_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _small(field.type)) for field in arrow_type])
    return arrow_type


def validate(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> pa.Table:
    """Return `table` unchanged if every row satisfies `model`."""
    if broken := violations(table, model):
        raise SchemaError(
            f"rows do not satisfy {model.__name__}: {'; '.join(broken)}. Nothing was written."
        )
    return table


_ARROW_CHECKS: dict[str, Callable[..., pa.ChunkedArray]] = {
    "greater_than_or_equal_to": lambda values, min_value: pc.greater_equal(values, min_value),
    "equal_to": lambda values, value: pc.equal(values, value),
    "isin": lambda values, allowed_values: pc.is_in(values, pa.array(allowed_values)),
}
"""Pandera's checks of one column, by their names there."""


def violations(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> list[str]:
    """Return each column and rule that rows fail, with how many do; never their values."""
    if _satisfies(table, model):
        return []
    failures: dict[str, int] = {}
    try:
        model.validate(pl.DataFrame(table), lazy=True)
    except pandera.errors.SchemaErrors as errors:
        for error in errors.schema_errors:
            column = getattr(error.schema, "name", None) or "row"
            rule = getattr(error.check, "name", None) or error.check or error.reason_code
            cases = error.failure_cases
            num_rows = len(cases) if isinstance(cases, pl.DataFrame) else 1
            failures[f"{column}: {rule}"] = num_rows
    return [f"{rule} ({num_rows} rows)" for rule, num_rows in failures.items()]


def _satisfies(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> bool:
    """Return whether rows of the model's own Arrow types satisfy it; others are for pandera to say.

    Pandera asks polars 90 questions, which take 20 ms whatever the rows.
    """
    schema = model.to_schema()
    return (
        table.schema.equals(arrow_schema(model))
        and all(_holds(column, table[name]) for name, column in schema.columns.items())
        and _passes(schema.checks, table)
    )


def _holds(column: pa_polars.Column, values: pa.ChunkedArray) -> bool:
    if values.null_count and not column.nullable:
        return False
    if column.unique and pc.count_distinct(values).as_py() < len(values):
        return False
    return all(
        check.name in _ARROW_CHECKS
        and pc.all(_ARROW_CHECKS[check.name](values, **check.statistics)).as_py() is not False
        for check in column.checks
    )


def _passes(checks: Sequence[pa_polars.Check], table: pa.Table) -> bool:
    """Return whether all rows pass all checks, which polars answers in one go."""
    rows = pl.from_arrow(table, rechunk=False)
    assert isinstance(rows, pl.DataFrame)
    answers = pl.collect_all([check(rows.lazy()).check_passed for check in checks])
    return all(answer.item() for answer in answers)
