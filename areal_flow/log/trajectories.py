"""The trajectory dataset as workers see it: they write fragments, and read rows by id.

Fragments become visible when the driver commits them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from lance import LanceDataset
from lance.fragment import LanceFragment, write_fragments

from areal_flow.core.errors import StorageError, TokensDropped
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import submission_index_of
from areal_flow.log.codec import CONTENT_COLUMNS, TRAJECTORIES, array_rows, content_hashes
from areal_flow.log.dataset import (
    BYTES_AT_ONCE,
    IO_BUFFER_BYTES,
    conjunction,
    dataset_uri,
    fence_condition,
    open_dataset,
    portions_from_newest,
    storage_errors,
)
from schemas import TrajectoryRow, validate


def validate_groups(table: pa.Table) -> None:
    validate(table.replace_schema_metadata(None), TrajectoryRow)


def write_groups(path: Path, table: pa.Table) -> tuple[str, ...]:
    """Write validated groups, to be committed together; until then their rows are invisible."""
    rows = table.replace_schema_metadata(None)
    with storage_errors(path):
        fragments = write_fragments(rows, dataset_uri(path), schema=TRAJECTORIES, mode="append")
    return tuple(json.dumps(fragment.to_json()) for fragment in fragments)


class TrainingRows:
    """Reads trajectories by id, for training and replay: every row is compared with its hash.

    One batch may be read ahead, while a step runs. Any thread; one reads at a time:

    | who           | waits for                    | unblocked by   |
    |---------------|------------------------------|----------------|
    | a step        | rows that are being read     | that read      |
    | reading ahead | the step's read of its rest  | that read      |
    """

    COLUMNS = (
        *("submission_index", "source", "difficulty", "finish_reason", "reward_parts"),
        *CONTENT_COLUMNS,
        "content_hash",
    )

    def __init__(self, layout: RunLayout, *, until: int | None = None) -> None:
        """Expect rows among the newest, or among those that were in the log when it had `until`."""
        self._layout = layout
        self._until = until
        self._rows_at_once = 32
        """How many of Lance's rows make `BYTES_AT_ONCE`, as the last batch had them."""
        self._reading = Lock()
        self._ahead: dict[str, Mapping[str, Any]] = {}

    @cached_property
    def _dataset(self) -> LanceDataset:
        return open_dataset(self._layout.trajectories)

    @cached_property
    def _counted(self) -> str | None:
        return fence_condition(self._layout, "trajectories")

    def __call__(self, trajectory_ids: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return exactly these rows, in this order, as `array_rows`."""
        with self._reading:
            missing = [i for i in trajectory_ids if i not in self._ahead]
            if missing:
                self._ahead.update(zip(missing, self._read(missing), strict=True))
            return [self._ahead.pop(identifier) for identifier in trajectory_ids]

    def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Read the rows of the next batch, in place of those that were read ahead before."""
        with self._reading:
            self._ahead = {}
            self._ahead = dict(zip(trajectory_ids, self._read(trajectory_ids), strict=True))

    def _read(self, trajectory_ids: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        table, places = self._find(trajectory_ids)
        if places.null_count:
            missing = trajectory_ids[places.is_null().index(True).as_py()]
            raise StorageError(
                f"expected {len(trajectory_ids)} trajectories in the log, {places.null_count} are "
                f"missing, the first is {missing}"
            )
        rows, hashes = array_rows(table), content_hashes(table)
        for place in places.to_pylist():
            if len(rows[place]["loss_mask"]) and not len(rows[place]["output_tokens"]):
                raise TokensDropped(
                    f"the tokens of trajectory {rows[place]['trajectory_id']} were dropped: "
                    "log.keep_tokens_of keeps those of recent steps, and older ones cannot be "
                    "replayed; expected a step after the oldest checkpoint but that of step 0"
                )
            if rows[place]["content_hash"] != hashes[place]:
                raise StorageError(
                    f"trajectory {rows[place]['trajectory_id']} is not what was written: expected "
                    f"content_hash {rows[place]['content_hash']}, found {hashes[place]}. Restore "
                    f"{self._layout.trajectories.name} from a copy"
                )
        return [rows[place] for place in places.to_pylist()]

    def _find(self, trajectory_ids: Sequence[str]) -> tuple[pa.Table, pa.Array]:
        """Return a table that has these rows, and the place of each; null where it has none."""
        self._dataset.checkout_latest()
        table, places = _search(
            self._dataset,
            _searched_last_first(self._dataset, self._until),
            trajectory_ids,
            columns=list(self.COLUMNS),
            filter=self._counted,
            batch_size=self._rows_at_once,
            io_buffer_size=IO_BUFFER_BYTES,
        )
        self._rows_at_once = max(1, BYTES_AT_ONCE * len(table) // max(1, table.nbytes))
        return table, places


def find_trajectories(layout: RunLayout, trajectory_ids: Sequence[str], *, until: int) -> pa.Table:
    """Return those of these trajectories that the log has.

    Args:
        layout: the run.
        trajectory_ids: which trajectories.
        until: how many the log had when they were consumed: they are looked for before it.
    """
    dataset = open_dataset(layout.trajectories)
    table, places = _search(
        dataset,
        _searched_last_first(dataset, until),
        trajectory_ids,
        filter=fence_condition(layout, "trajectories"),
    )
    return table.take(places.drop_null())


def _searched_last_first(dataset: LanceDataset, until: int | None) -> list[LanceFragment]:
    """Return a dataset's fragments: last the newest of those with its first `until` rows."""
    fragments: list[LanceFragment] = dataset.get_fragments()
    if until is None:
        return fragments
    ends = [*accumulate(each.metadata.num_rows for each in fragments)]
    num_older = bisect_left(ends, until) + 1
    return fragments[num_older:] + fragments[:num_older]


def _search(
    dataset: LanceDataset,
    fragments: list[LanceFragment],
    trajectory_ids: Sequence[str],
    *,
    filter: str | None,
    **how: Any,
) -> tuple[pa.Table, pa.Array]:
    """Return a table that has these rows, and the place of each; null where it has none.

    The last fragments are searched first: a step's rows are new, and a log may have a thousand.
    """
    identifiers = pa.array(trajectory_ids, pa.string())
    indices = sorted({submission_index_of(identifier) for identifier in trajectory_ids})
    in_submissions = f"submission_index IN ({', '.join(map(str, indices)) or 'NULL'})"
    where = conjunction(in_submissions, filter)
    # Only the fragments that have rows are read in full.
    holding, is_located = list[LanceFragment](), pa.array([False] * len(identifiers), pa.bool_())
    for portion in portions_from_newest(fragments):
        located = dataset.scanner(
            ["trajectory_id"], filter=where, fragments=portion, with_row_address=True
        ).to_table()
        numbers = {address >> 32 for address in located["_rowaddr"].to_pylist()}
        holding += [each for each in portion if each.fragment_id in numbers]
        is_located = pc.or_(is_located, pc.is_in(identifiers, value_set=located["trajectory_id"]))
        if pc.all(is_located).as_py():
            break
    holding = holding or fragments[-1:]  # no fragments would be all of them
    table = dataset.scanner(filter=where, fragments=holding, **how).to_table()
    return table, pc.index_in(identifiers, table["trajectory_id"])
