"""Validation of a table of rows: its messages, and its cost for a valid table."""

from __future__ import annotations

from typing import Any

import pandera.polars as pandera
import polars as pl
import pyarrow as pa
import pytest

from areal_flow.core.errors import SchemaError
from areal_flow.log.codec import TRAJECTORIES
from schemas import EvaluationRow, TrajectoryRow, arrow_schema, validate, violations
from tests.rows import group_table

ROWS: list[dict[str, Any]] = group_table(0, rewards=(1.0, None)).to_pylist()


def changed(**values: Any) -> pa.Table:
    """Return two rows with other values in the first."""
    return pa.Table.from_pylist([ROWS[0] | values, *ROWS[1:]], schema=TRAJECTORIES)


@pytest.mark.parametrize(
    ("values", "broken"),
    [
        ({"member": -1}, "member: greater_than_or_equal_to (1 rows)"),
        ({"writer_epoch": 0}, "writer_epoch: greater_than_or_equal_to (1 rows)"),
        ({"finish_reason": "tired"}, "finish_reason: isin (1 rows)"),
        ({"schema_version": 1}, "schema_version: equal_to (1 rows)"),
        (
            {"trajectory_id": ROWS[1]["trajectory_id"]},
            "trajectory_id: field_uniqueness (2 rows)",
        ),
        (
            {"loss_mask": [True]},
            "TrajectoryRow: output_tokens, behavior_logprobs and loss_mask have equal lengths "
            "(1 rows)",
        ),
        (
            {"version_spans": [{"version": 0, "length": 9}]},
            "TrajectoryRow: version_spans cover every output token (1 rows)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_rule_is_named_with_its_rows(values: dict[str, Any], broken: str) -> None:
    assert violations(changed(**values), TrajectoryRow) == [broken]
    with pytest.raises(SchemaError, match="rows do not satisfy TrajectoryRow: "):
        validate(changed(**values), TrajectoryRow)


def test_missing_values_and_other_columns_are_named() -> None:
    schema = pa.schema([field.with_nullable(True) for field in TRAJECTORIES])
    table = pa.Table.from_pylist([ROWS[0] | {"seed": None}], schema=schema)
    assert violations(table, TrajectoryRow) == ["seed: not_nullable (1 rows)"]
    fewer = changed().drop_columns(["seed"])
    assert violations(fewer, TrajectoryRow) == ["TrajectoryRow: column_in_dataframe (1 rows)"]
    typed = changed().set_column(0, "trajectory_id", pa.array([1, 2]))
    assert violations(typed, TrajectoryRow) == ["trajectory_id: dtype('String') (1 rows)"]


def test_valid_rows_are_not_checked_by_pandera(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("pandera was asked")

    for model in (TrajectoryRow, EvaluationRow):
        monkeypatch.setattr(model, "validate", never)
    assert validate(changed(), TrajectoryRow).num_rows == 2
    assert violations(changed().slice(0, 0), TrajectoryRow) == []
    assert violations(arrow_schema(EvaluationRow).empty_table(), EvaluationRow) == []


def test_quick_validation_covers_every_pandera_check() -> None:
    class Small(pandera.DataFrameModel):
        number: pl.Int64 = pandera.Field(lt=3)

    schema = arrow_schema(Small)
    assert violations(pa.table({"number": [1, 2]}, schema), Small) == []
    assert violations(pa.table({"number": [1, 4]}, schema), Small) == ["number: less_than (1 rows)"]
