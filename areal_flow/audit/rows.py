"""Rules of stored rows that are no query: schemas, content hashes, seeds, prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.audit.findings import ADVICE, Finding
from areal_flow.controller.seeds import member_seed
from schemas import arrow_schema, content_hash_mismatches, violations

_PROMPT_COLUMNS = ("prompt_id", "difficulty", "prompt_tokens")


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
    table: pa.Table, model: type[pa_polars.DataFrameModel], *, where: str, kind: str
) -> Iterator[Finding]:
    """Yield one finding for each column and rule that the rows break.

    Args:
        kind: of what is damaged then, as in `ADVICE`.
    """
    advice = ADVICE[kind]
    expected = f"rows of {model.__name__}"
    wanted, found = set(arrow_schema(model).names), set(table.schema.names)
    if wanted != found:
        odd = ", ".join(sorted(wanted ^ found))
        yield Finding("schema", where, expected, f"missing or unknown columns: {odd}", advice)
        return
    for broken in violations(table, model):
        yield Finding("schema", where, expected, broken, advice)


def check_contents(table: pa.Table) -> Iterator[Finding]:
    """Yield trajectories that are not what was written."""
    for identifier, expected, found in content_hash_mismatches(table):
        yield Finding("content-hash", identifier, expected, found, ADVICE["log"])


def check_seeds(table: pa.Table, *, run_seed: int) -> Iterator[Finding]:
    """Yield trajectories whose seed does not follow from run, submission and member."""
    names = ("trajectory_id", "submission_index", "member", "seed")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    for identifier, index, member, seed in rows:
        expected = member_seed(run_seed, index, member)
        if seed != expected:
            yield Finding("seed", identifier, str(expected), str(seed), ADVICE["log"])


def check_prompts(table: pa.Table, prompts: pa.Table) -> Iterator[Finding]:
    """Yield trajectories whose prompt is not that of their submission.

    Args:
        prompts: the prompt table's rows for the same submissions, in the same order.
    """
    for name in _PROMPT_COLUMNS:
        found = table[name].combine_chunks()
        expected = prompts[name].combine_chunks().cast(found.type)
        if found.equals(expected):
            continue
        for row, identifier in enumerate(table["trajectory_id"].to_pylist()):
            if not found.slice(row, 1).equals(expected.slice(row, 1)):
                wanted = f"{name} of the prompt table at its submission"
                yield Finding("prompt", identifier, wanted, "another", ADVICE["log"])


def _has_holes(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    return pa.types.is_list(field.type) and bool(pc.list_flatten(column).null_count)
