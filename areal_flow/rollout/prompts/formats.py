"""The formats of rows: files, folders and Lance datasets, read one row at a time; hub names.

Every reader yields the origin of a row (file and line) with the row. Nothing here judges a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from areal_flow.core.errors import PromptError
from areal_flow.rollout.prompts.rows import Row

MAX_LINE_BYTES = 64 << 20
BATCH_ROWS = 256
FORMATS = (
    "a JSONL (.jsonl, .json), Parquet (.parquet), CSV (.csv) or Arrow (.arrow, .feather, .ipc) "
    "file, a Lance dataset (.lance) or a folder of `datasets.save_to_disk`"
)
_ARROW_FILE = b"ARROW1"
"""How Arrow's file format begins; the stream format has no such mark."""
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>.+))?")
Rows = Iterator[tuple[str, Row | bytes]]


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset of the Hugging Face hub, written `owner/name:config@split`."""

    name: str
    config: str | None
    split: str | None


def hub_dataset(path: Path) -> HubDataset | None:
    """Return the dataset that a path of rows names, unless it is a path of this machine.

    Without config and split, a name with the suffix of a file, or in a folder that exists, is a
    path.
    """
    match = _HUB_NAME.fullmatch(str(path))
    if match is None or path.exists():
        return None
    dataset = HubDataset(**match.groupdict())
    is_qualified = dataset.config or dataset.split
    is_local = path.suffix in READERS or path.parent.is_dir()
    return dataset if is_qualified or not is_local else None


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is one of `datasets.save_to_disk`."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_rows(path: Path) -> Rows:
    """Yield the origin (file and line) of each row, and the row; for JSONL the unparsed line."""
    rows = _reader(path)(path)
    if (first := next(rows, None)) is None:
        raise PromptError(f"{path} is empty: expected one row or more")
    yield first
    yield from rows


def _reader(path: Path) -> Callable[[Path], Rows]:
    if is_saved_dataset(path):
        return _read_saved
    if path.suffix != ".lance" and not path.exists():
        raise PromptError(f"expected a file or folder of rows at {path}, found none")
    reader = READERS.get(path.suffix)
    if reader is None or (path.is_dir() and path.suffix != ".lance"):
        kind = "another folder" if path.is_dir() else path.suffix or "no suffix"
        raise PromptError(f"{path}: expected {FORMATS}, found {kind}")
    return reader


def _read_jsonl(path: Path) -> Rows:
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = line
            while len(rest) >= MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = lines.readline(MAX_LINE_BYTES)
            if line.strip():
                yield f"{path}, line {number}", line


def _read_parquet(path: Path) -> Rows:
    try:
        with pq.ParquetFile(path) as file:
            yield from _numbered(path, file.iter_batches(batch_size=BATCH_ROWS))
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path} is not a readable Parquet file: {error}") from None


def _read_csv(path: Path) -> Rows:
    """Read values as text, so that an answer stays as it is written; an empty value is null."""
    parsed = pa_csv.ParseOptions(newlines_in_values=True)
    blocks = pa_csv.ReadOptions(block_size=MAX_LINE_BYTES)
    try:
        names = pa_csv.open_csv(path, parse_options=parsed, read_options=blocks).schema.names
        as_text = pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            null_values=[""],
        )
        yield from _numbered(path, pa_csv.open_csv(path, blocks, parsed, as_text))
    except pa.ArrowInvalid as error:
        if not path.stat().st_size:
            return
        raise PromptError(f"{path} is not a readable CSV file with a header: {error}") from None


def _read_arrow(path: Path) -> Rows:
    try:
        with pa.memory_map(str(path)) as file:
            if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
                reader = pa.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = pa.ipc.open_stream(file)
            yield from _numbered(path, batches)
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path} is not a readable Arrow file: {error}") from None


def _read_lance(path: Path) -> Rows:
    import lance  # imported here: slow, and rarely needed

    if not path.exists():
        raise PromptError(f"expected a Lance dataset at {path}, found none")
    try:
        dataset = lance.dataset(path)
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} is not a readable Lance dataset: {error}") from None
    yield from _numbered(path, dataset.to_batches(batch_size=BATCH_ROWS, scan_in_order=True))


def _read_saved(path: Path) -> Rows:
    """Read a folder of `datasets.save_to_disk`: one dataset, or several splits with a `train`."""
    try:
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
            if "train" not in splits:
                raise PromptError(
                    f"{path} has the splits {', '.join(splits)}, expected train: name the folder "
                    f"of one, {path / splits[0]}"
                )
            path = path / "train"
        state = json.loads((path / "state.json").read_text())
        files = [path / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise PromptError(
            f"{path} is not a readable folder of `datasets.save_to_disk`: {error}"
        ) from None
    yield from chain.from_iterable(map(_read_arrow, files))


def _numbered(path: Path, batches: Iterable[pa.RecordBatch]) -> Rows:
    number = 0
    for batch in batches:
        if len(set(batch.schema.names)) < batch.num_columns:
            raise PromptError(f"{path}: two columns have the same name in {batch.schema.names}")
        for start in range(0, len(batch), BATCH_ROWS):
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield f"{path}, row {number}", row


READERS: Mapping[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".json"), _read_jsonl),
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), _read_arrow),
    ".lance": _read_lance,
}
"""By suffix; `_read_saved` is for folders that have none."""
