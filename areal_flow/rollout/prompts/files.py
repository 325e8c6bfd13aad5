"""Reads rows one at a time, of any format in `formats`.

Errors name file and line. A file with bad rows is refused; the error lists the first ten kinds.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import numpy as np
import xxhash

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import PromptError
from areal_flow.rollout.prompts.formats import MAX_LINE_BYTES, read_rows
from areal_flow.rollout.prompts.rows import Row, given_id

MAX_NAMED = 10
"""Kinds of bad rows in a message."""

Result = TypeVar("Result")
Place = tuple[Path, int]
"""A file, and the index of a row in it."""


def read_prompts(
    path: Path,
    make: Callable[[Row], Result],
    *,
    on_bad: Callable[[Place, PromptError], None],
    keeps: Callable[[int], bool] = lambda place: True,
    refused: Mapping[int, str] = MappingProxyType({}),
    once: bool = False,
) -> Iterator[Result]:
    """Yield the result of `make` for each row of a file.

    Args:
        path: the file.
        make: raises ValueError for a bad row.
        on_bad: called with each bad row, which is left out.
        keeps: whether the row at an index is read at all.
        refused: by index, why rows are bad because of other rows in the file.
        once: whether equal lines of JSONL, such as a curriculum's, share one result.
    """

    def of_line(line: bytes) -> Result:
        return make(_parsed(line))

    of_line = cache(of_line) if once else of_line
    for index, (origin, entry) in enumerate(read_rows(path)):
        if not keeps(index):
            continue
        try:
            if index in refused:
                raise ValueError(refused[index])
            result = make(entry) if isinstance(entry, dict) else of_line(entry)
        except ValueError as error:
            on_bad((path, index), PromptError(f"{origin}: {error}"))
        else:
            yield result


def repeated_ids(path: Path) -> dict[int, str]:
    """Return by index why rows are bad: an earlier row has the same id and different content.

    Equal rows may share an id. Memory: 8 bytes per row.
    """
    ids = array("Q")
    for _, entry in read_rows(path):
        identifier = _id_of(entry)
        ids.append(xxhash.xxh3_64_intdigest(identifier.encode()) if identifier else 0)
    hashes = np.frombuffer(ids, np.uint64)
    values, counts = np.unique(hashes, return_counts=True)
    if not (repeated := {*values[counts > 1].tolist()} - {0}):
        return {}
    first: dict[str, tuple[str, str]] = {}
    reasons: dict[int, str] = {}
    for index, (origin, entry) in enumerate(read_rows(path)):
        if int(hashes[index]) not in repeated:
            continue
        row = _parsed(entry)
        identifier = given_id(row)
        content = sha256_hex(json.dumps(row, sort_keys=True, default=str))
        first_origin, first_content = first.setdefault(identifier, (origin, content))
        if content != first_content:
            reasons[index] = (
                f"duplicate id {identifier!r}: a different row at {first_origin} has it. Give each "
                "row a unique id, or omit ids."
            )
    return reasons


def _id_of(entry: Row | bytes) -> str:
    """Return a row's id; empty for an invalid line, which is refused when it is read."""
    try:
        return given_id(_parsed(entry))
    except ValueError:
        return ""


def refuse_bad_rows(errors: Mapping[Place, PromptError], *, advice: str = "") -> None:
    """Raise an error that lists bad rows in order; one line for reasons that differ in numbers."""
    if not errors:
        return
    texts_by_reason: dict[str, list[str]] = {}
    for place in sorted(errors):
        text = str(errors[place])
        reason = re.sub(r"\d+", "0", text.partition(": ")[2])
        texts_by_reason.setdefault(reason, []).append(text)
    lines = [
        texts[0] + (f" (and {len(texts) - 1} more such rows)" if len(texts) > 1 else "")
        for texts in texts_by_reason.values()
    ]
    if len(errors) == 1:
        raise PromptError(f"{lines[0]}. Fix it{advice}")
    first = f", the first {MAX_NAMED} kinds" if len(lines) > MAX_NAMED else ""
    named = "".join(f"\n  {line}" for line in lines[:MAX_NAMED])
    raise PromptError(f"{len(errors)} rows are bad{first}:{named}\nFix them{advice}")


def _parsed(line: Row | bytes) -> Row:
    if isinstance(line, dict):
        return line
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        row = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key appears twice")
    return row


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
"""Made once: `json.loads` with these options would make a decoder for every line."""
