"""The Arrow schema of a pandera model, a table's check against it, and the type that pandera lacks.

The only place where the two type systems meet.
"""

from __future__ import annotations

from typing import Any

import pandera.errors
import pandera.polars as pa_polars
import polars as pl
import pyarrow as pa
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
