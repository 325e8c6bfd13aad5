"""The Arrow schema of a pandera model, a table's check against it, and the type that pandera lacks.

The only place where the two type systems meet.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pandera.backends.polars.builtin_checks  # registers what a check of a column computes
import pandera.errors
import pandera.polars as pa_polars
import polars as pl
import pyarrow as pa
from pandera.api.polars.types import PolarsData
from pandera.dtypes import immutable
from pandera.engines import polars_engine

from areal_flow.core.errors import SchemaError


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

    Pandera asks polars 90 questions, which take 20 ms whatever the rows; here they are one query.
    """
    if not table.schema.equals(arrow_schema(model)):
        return False
    rows = pl.from_arrow(table, rechunk=False)
    assert isinstance(rows, pl.DataFrame)
    return all(rows.select(_rules(model)).row(0))  # type: ignore[arg-type] # mypy finds no hash


class _RuleOfCheck:
    """Passed to a pandera check instead of a frame: returns the expression that it selects."""

    def select(self, rule: pl.Expr) -> pl.Expr:
        return rule


@cache
def _rules(model: type[pa_polars.DataFrameModel]) -> list[pl.Expr]:
    """Return an expression for each rule of a model; a null result of a check passes."""
    schema = model.to_schema()
    rules = [pl.col(n).null_count() == 0 for n, of in schema.columns.items() if not of.nullable]
    rules += [pl.col(n).is_unique().all() for n, of in schema.columns.items() if of.unique]
    checks = [(check, name) for name, of in schema.columns.items() for check in of.checks]
    for check, name in [*checks, *((check, "*") for check in schema.checks)]:
        rule = check._check_fn(PolarsData(_RuleOfCheck(), name), **check._check_kwargs)
        rules.append(rule.all())
    return [rule.alias(str(number)) for number, rule in enumerate(rules)]
