"""Async facade over both logs: commits off the event loop, waiting trajectories, evaluations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lance
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import GroupReceipt, TrajectoryReceipt
from areal_flow.log.accounting import CommittedGroups
from areal_flow.log.codec import RECEIPT_COLUMNS, TRAJECTORIES, receipts
from areal_flow.log.database import LEDGER_COLUMNS, LOG_COLUMNS, consumption_table
from areal_flow.log.dataset import (
    Maintenance,
    create_dataset,
    dataset_uri,
    read_rows,
    storage_errors,
)
from areal_flow.log.ledger import STEPS, Ledger
from areal_flow.log.trajectories import TrajectoryCommitter
from schemas import EvaluationRow, arrow_schema, validate

logger = logging.getLogger(__name__)
T = TypeVar("T")

EVALUATIONS = arrow_schema(EvaluationRow)


class CommittedLogs:
    """The controller's `Logs` over Lance: writes in a thread, and maintains datasets beside it."""

    def __init__(self, committer: TrajectoryCommitter, ledger: Ledger) -> None:
        self._committer = committer
        self._ledger = ledger
        self._rounds: dict[Maintenance, asyncio.Task[None]] = {}

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        return await self._write(self._committer.maintenance, self._committer.commit, receipts)

    async def append(self, row: dict[str, Any]) -> None:
        await self._write(self._ledger.maintenance, self._ledger.append, row)

    async def close(self) -> None:
        await asyncio.gather(*self._rounds.values())

    async def _write(self, maintenance: Maintenance, write: Callable[..., T], *arguments: Any) -> T:
        written = await asyncio.to_thread(write, *arguments)
        newest = self._rounds.get(maintenance)
        if maintenance.is_due and (newest is None or newest.done()):
            self._rounds[maintenance] = asyncio.create_task(_maintain(maintenance))
        return written


async def _maintain(maintenance: Maintenance) -> None:
    try:
        await asyncio.to_thread(maintenance.run)
    except (OSError, RuntimeError, ValueError, StorageError) as error:
        logger.warning("a dataset could not be compacted, it only grows: %s", error)


def create_logs(layout: RunLayout) -> None:
    create_dataset(layout.trajectories, TRAJECTORIES, stable_row_ids=True)
    create_dataset(layout.steps, STEPS)


def read_unconsumed(
    layout: RunLayout, ledger: Ledger, *, verifier: str
) -> tuple[Sequence[TrajectoryReceipt], CommittedGroups]:
    """Return trajectories that no ledger row names, and the account of all."""
    columns = {"submission_index", "verifier", *RECEIPT_COLUMNS, *LOG_COLUMNS}
    stored = read_rows(layout, "trajectories", sorted(columns))
    statuses = consumption_table(ledger.table(list(LEDGER_COLUMNS)), stored)["status"]
    waiting = stored.filter(pc.equal(statuses, "waiting"))
    other = waiting.filter(pc.not_equal(waiting["verifier"], verifier))
    lengths = pc.struct_field(pc.list_flatten(stored["version_spans"]), "length")
    committed = CommittedGroups(
        submission_indices=frozenset(pc.unique(stored["submission_index"]).to_pylist()),
        num_tokens=pc.sum(lengths).as_py() or 0,
        other_verifier=frozenset(other["trajectory_id"].to_pylist()),
    )
    return receipts(waiting), committed


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
