"""Questions of JSONL and Parquet files, one at a time; errors name file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from areal_flow.errors import PromptError

MAX_LINE_BYTES = 1 << 20
PARQUET_BATCH_ROWS = 256
MAX_DIFFICULTY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a source gives it, before template and tokeniser.

    `metadata` is JSON: whatever else the source says, for the reward. `origin` is where an error
    message points: a file and line, or a generator's item.
    """

    question_id: str
    text: str
    answer: str
    difficulty: int
    origin: str
    metadata: str = "{}"


def read_questions(
    path: Path, *, question_field: str, answer_field: str
) -> Iterator[Question | PromptError]:
    """Yield a file's questions; for a row that is none, the error that names file, line and field.

    Fields `id` and `difficulty` are optional. All other fields are a question's metadata, those of
    a field `metadata` among them.

    Raises:
        PromptError: the file is missing, empty, or of an unknown kind.
    """
    known = {question_field, answer_field, *_OWN_FIELDS}
    for origin, row in _read_rows(path):
        try:
            if isinstance(row, PromptError):
                raise row
            yield Question(
                question_id=str(row.get("id") or row.get("prompt_id") or ""),
                text=_text(row, question_field, origin),
                answer=_text(row, answer_field, origin),
                difficulty=_difficulty(row, origin),
                origin=origin,
                metadata=_metadata(row, known),
            )
        except PromptError as error:
            yield error


def good(question: Question | PromptError) -> Question:
    """Return a question that is one.

    Raises:
        PromptError: it is an error instead.
    """
    if isinstance(question, PromptError):
        raise question
    return question


_OWN_FIELDS = ("id", "prompt_id", "difficulty", "metadata")


def _metadata(row: dict[str, Any], known: set[str]) -> str:
    columns = {name: value for name, value in row.items() if name not in known}
    nested = row.get("metadata")
    columns |= nested if isinstance(nested, Mapping) else {}
    # Parquet knows dates, decimals and bytes, JSON does not.
    return json.dumps(columns, default=str)


def _text(row: dict[str, Any], field: str, origin: str) -> str:
    value = row.get(field)
    if field not in row:
        found = ", ".join(sorted(row)) or "none"
        raise PromptError(f"{origin}: field {field!r} is missing; found fields: {found}")
    if not isinstance(value, str) or not value.strip():
        raise PromptError(
            f"{origin}: field {field!r}: expected non-empty text, found {str(value)[:40]!r}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{origin}: field {field!r}: not encodable text: {error}") from None
    return value


def _difficulty(row: dict[str, Any], origin: str) -> int:
    value = row.get("difficulty", 0)
    if type(value) is not int or not 0 <= value <= MAX_DIFFICULTY:
        raise PromptError(
            f"{origin}: field 'difficulty': expected an integer from 0 to {MAX_DIFFICULTY}, found "
            f"{value!r}"
        )
    return value


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | PromptError]]:
    """Yield each row with its origin; a malformed line yields the error that describes it."""
    if not path.is_file():
        raise PromptError(f"expected a prompt file at {path}, found none")
    if path.stat().st_size == 0:
        raise PromptError(f"{path} is empty; expected one JSON object a line")
    match path.suffix:
        case ".jsonl" | ".json":
            yield from _read_jsonl(path)
        case ".parquet":
            yield from _read_parquet(path)
        case suffix:
            raise PromptError(f"{path}: expected .jsonl or .parquet, found {suffix or 'no suffix'}")


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any] | PromptError]]:
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            origin = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = lines.readline(MAX_LINE_BYTES)
                yield origin, PromptError(f"{origin}: longer than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield origin, _parse_line(line, origin)


def _parse_line(line: bytes, origin: str) -> dict[str, Any] | PromptError:
    try:
        row = json.loads(
            line, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except (ValueError, RecursionError) as error:
        return PromptError(f"{origin}: not valid JSON: {error}")
    if not isinstance(row, dict):
        return PromptError(f"{origin}: expected a JSON object, found {type(row).__name__}")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key appears twice")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any] | PromptError]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path} is not a readable Parquet file: {error}") from None
