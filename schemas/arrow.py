"""Pandera model in, Arrow schema out. The only place where the two type systems meet."""

from __future__ import annotations

import pandera.polars as pa_polars
import polars as pl
import pyarrow as pa


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
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _small(field.type)) for field in arrow_type])
    return arrow_type
