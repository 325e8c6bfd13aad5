"""Held-out answers before and after training, side by side."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from areal_flow.store.database import empty_database, read_sql


def compared_answers(answers: pa.Table, *, pass_threshold: float) -> list[dict[str, Any]]:
    """Return answers of the first evaluation beside those of the last, by difficulty.

    Two prompts of each of the first eight difficulties, always the same ones. Only evaluations with
    the verifier of the last one count; there are no rows unless two policies gave the answers.

    Args:
        answers: rows of the evaluations.
    """
    with empty_database() as connection:
        connection.register("answers", answers)
        connection.execute(read_sql("passing"))
        found = connection.sql(read_sql("compared"), params={"threshold": pass_threshold})
        rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows
