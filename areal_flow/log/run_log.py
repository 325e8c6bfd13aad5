"""The log of a run as its driver writes it: groups and step rows, and the answers of evaluations.

Trajectories are appended once and never changed. The first commit of a group wins.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import duckdb
import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance import LanceDataset, LanceOperation
from lance.fragment import FragmentMetadata

from areal_flow.core.errors import StorageError
from areal_flow.core.failures import first_line
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Fence, Writer, is_sole_writer, record_fence
from areal_flow.core.types import GroupReceipt, TrajectoryReceipt
from areal_flow.log.codec import RECEIPT_COLUMNS, TRAJECTORIES, receipts
from areal_flow.log.database import LEDGER_COLUMNS, LOG_COLUMNS, consumption_table
from areal_flow.log.dataset import (
    Log,
    create_dataset,
    dataset_uri,
    open_dataset,
    read_rows,
    remove_orphans,
    storage_errors,
)
from areal_flow.log.index import extend_index
from areal_flow.log.ledger import STEPS, LedgerReader
from areal_flow.log.ledger_row import CommittedGroups
from areal_flow.log.maintenance import Maintenance
from areal_flow.log.retention import Retention
from areal_flow.log.settled import (
    num_completion_tokens,
    past_of,
    read_past,
    read_trajectories,
    record_past,
)
from areal_flow.policy.weights.shared_memory import free_segments
from schemas import EvaluationRow, arrow_schema, validate

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

EVALUATIONS = arrow_schema(EvaluationRow)


def create_logs(layout: RunLayout) -> None:
    create_dataset(layout.trajectories, TRAJECTORIES, stable_row_ids=True)
    create_dataset(layout.steps, STEPS)


def take_over(layout: RunLayout, writer: Writer) -> None:
    """Make a run directory this writer's.

    While an earlier driver is alive, a fence records where the logs end: rows that it still writes
    are not visible. Once all are dead, their unfinished writes are removed, which are older than
    this writer's lease.
    """
    writer.check_current()
    if not is_sole_writer(writer):
        evaluations = layout.evaluations
        fence = Fence(
            writer.writer_epoch,
            trajectory_watermark=open_dataset(layout.trajectories).count_rows(),
            step=LedgerReader(layout).head,
            evaluation_watermark=open_dataset(evaluations).count_rows()
            if evaluations.exists()
            else 0,
        )
        record_fence(layout.writers, fence)
        return
    for dataset in (layout.trajectories, layout.steps):
        if num_removed := remove_orphans(dataset, written_before=writer.began_at):
            logger.info("removed %d files that no version of %s names", num_removed, dataset.name)
    leftovers = [
        *layout.weights.glob("[0-9]*"),
        *layout.rendezvous.glob("[0-9]*"),
        *layout.processes.glob("[0-9]*"),
        *layout.checkpoints.glob(".partial-*"),
    ]
    for leftover in leftovers:
        if int(leftover.name.rpartition("-")[2]) < writer.writer_epoch:
            free_segments(leftover)
            shutil.rmtree(leftover, ignore_errors=True)


class RunLog(LedgerReader):
    """Trajectories and ledger of a run, for the driver that holds it; the flow's `Logs`.

    Writes run in a thread, for each dataset one at a time, and compactions beside them. A step row
    is checked against the Arrow schema; pandera's check costs more than a small step.
    """

    tokens_needed_after: int = 0
    """The step of the oldest checkpoint from which a trainer may be restored: rows of later steps
    keep their tokens."""

    def __init__(
        self, layout: RunLayout, writer: Writer, *, keep_tokens_of: int | Literal["all"] = "all"
    ) -> None:
        super().__init__(layout)
        self._writer = writer
        self._keep_tokens_of = keep_tokens_of
        self._retention = Retention(layout)
        self._trajectories = open_dataset(layout.trajectories)
        datasets: dict[Log, LanceDataset] = {
            "trajectories": self._trajectories,
            "steps": self._dataset,
        }
        self._maintenance = {
            name: Maintenance(getattr(layout, name), num_fragments=len(dataset.get_fragments()))
            for name, dataset in datasets.items()
        }
        self._compactions: dict[Log, asyncio.Task[None]] = {}
        self._is_committed = bytearray()
        """By submission index: a byte each, since a long run has millions of groups."""
        self.past = read_past(layout, self, num_trajectories=self.watermark)
        """What a resume need not read; the newest checkpoint's, once there is one."""
        self._mark_committed(range(self.past.next_open_submission))
        self._mark_committed(self.past.closed_submissions)
        later = read_trajectories(layout, self.past, ["submission_index"])
        self._mark_committed(pc.unique(later["submission_index"]).to_pylist())

    @property
    def watermark(self) -> int:
        """The number of trajectories in the log."""
        return int(self._trajectories.count_rows())

    async def commit(self, groups: Sequence[GroupReceipt]) -> int:
        """Append the groups' fragments in one version, except those of groups already committed.

        Returns:
            The watermark.
        """
        return await self._write("trajectories", self._commit, groups)

    async def append(self, row: dict[str, Any]) -> None:
        """Append the ledger's next row."""
        await self._write("steps", self._append, row)

    async def close(self) -> None:
        """Return when no compaction is running."""
        await asyncio.gather(*self._compactions.values())

    def sync(self) -> None:
        """Force both datasets to disk."""
        for maintenance in self._maintenance.values():
            maintenance.sync()

    def read_unconsumed(
        self, *, verifier: str
    ) -> tuple[Sequence[TrajectoryReceipt], CommittedGroups]:
        """Return the trajectories that no ledger row names, and what the past does not have."""
        columns = {"submission_index", "verifier", *RECEIPT_COLUMNS, *LOG_COLUMNS}
        stored = read_trajectories(self._layout, self.past, sorted(columns))
        steps = self.table(list(LEDGER_COLUMNS), since=self.past.ledger_since)
        statuses = consumption_table(steps, stored)["status"]
        waiting = stored.filter(pc.equal(statuses, "waiting"))
        by_other_verifiers = waiting.filter(pc.not_equal(waiting["verifier"], verifier))
        committed = CommittedGroups(
            submission_indices=frozenset(pc.unique(stored["submission_index"]).to_pylist()),
            num_tokens=num_completion_tokens(stored),
            other_verifier=frozenset(by_other_verifiers["trajectory_id"].to_pylist()),
        )
        return receipts(waiting), committed

    def settle(self, step: int) -> None:
        """Record the past up to a step: a resume begins to read there, and so does a query."""
        self.past = past_of(self._layout, self.past, step=step)
        self._writer.check_current()
        try:
            record_past(self._layout, self.past)
            extend_index(self._layout, self.past, writer_epoch=self._writer.writer_epoch)
        except (OSError, duckdb.Error, StorageError) as error:
            logger.warning("a resume and queries will read more of the log: %s", first_line(error))

    async def _write(self, log: Log, write: Callable[..., Result], *arguments: Any) -> Result:
        result = await asyncio.to_thread(write, *arguments)
        newest = self._compactions.get(log)
        if self._maintenance[log].is_due and (newest is None or newest.done()):
            self._compactions[log] = asyncio.create_task(self._compact(log))
        return result

    async def _compact(self, log: Log) -> None:
        try:
            await asyncio.to_thread(self._maintenance[log].run)
            if log == "trajectories" and self._keep_tokens_of != "all":
                until = min(self.tokens_needed_after, self.head - self._keep_tokens_of)
                await asyncio.to_thread(
                    self._retention.drop_tokens, self._maintenance[log], until=until
                )
        except (OSError, RuntimeError, ValueError, StorageError) as error:
            logger.warning("a dataset could not be compacted, it only grows: %s", error)

    def _commit(self, groups: Sequence[GroupReceipt]) -> int:
        committed, indices = self._is_committed, range(len(self._is_committed))
        new = [
            group
            for group in groups
            if group.submission_index not in indices or not committed[group.submission_index]
        ]
        descriptions = dict.fromkeys(text for group in new for text in group.fragments)
        fragments = [*map(FragmentMetadata.from_json, descriptions)]
        if not fragments:
            return self.watermark
        new_indices = [group.submission_index for group in new]
        num_rows = sum(fragment.num_rows for fragment in fragments)
        num_expected = sum(len(group.trajectories) for group in new)
        if num_rows != num_expected:
            raise StorageError(
                f"expected fragments of {num_expected} rows, those of groups {new_indices}, found "
                f"{num_rows}: groups that were written together are committed together, once"
            )
        self._writer.check_current()
        with self._maintenance["trajectories"].commit():
            self._trajectories = LanceDataset.commit(
                self._trajectories,
                LanceOperation.Append(fragments),
                read_version=self._trajectories.version,
            )
        self._mark_committed(new_indices)
        return self.watermark

    def _mark_committed(self, submission_indices: Sequence[int]) -> None:
        num_more = max(submission_indices, default=-1) + 1 - len(self._is_committed)
        self._is_committed.extend(bytes(max(0, num_more)))
        for index in submission_indices:
            self._is_committed[index] = 1

    def _append(self, row: dict[str, Any]) -> None:
        assert row["step"] == self.head + 1, "a step follows the one before"
        table = pa.Table.from_pylist([row], schema=STEPS)
        self._writer.check_current()
        with self._maintenance["steps"].commit():
            self._dataset = lance.write_dataset(table, self._dataset, mode="append")
        self.head = row["step"]


def append_evaluation(layout: RunLayout, rows: Sequence[dict[str, Any]], writer: Writer) -> None:
    """Append the answers of one evaluation; the first ones create the dataset."""
    table = validate(pa.Table.from_pylist(list(rows), schema=EVALUATIONS), EvaluationRow)
    writer.check_current()
    path = layout.evaluations
    if not path.exists():
        create_dataset(path, EVALUATIONS, stable_row_ids=True)
    with storage_errors(path):
        lance.write_dataset(table, dataset_uri(path), mode="append")


def evaluation_names(layout: RunLayout) -> list[str]:
    if not layout.evaluations.exists():
        return []
    names = read_rows(layout, "evaluations", ["evaluation"])["evaluation"]
    return sorted(pc.unique(names).to_pylist())


def read_evaluation(layout: RunLayout, name: str) -> list[dict[str, Any]]:
    if not layout.evaluations.exists():
        return []
    answers = read_rows(layout, "evaluations", where=f"evaluation = '{name}'")
    return answers.to_pylist()  # type: ignore[no-any-return]
