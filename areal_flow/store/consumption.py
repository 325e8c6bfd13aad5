"""What became of every trajectory: trained, discarded or waiting, by the ledger's rows.

Found by columns, so that a long past costs no memory: of most rows only ids and lengths are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.recovery.plan import CommittedGroups
from areal_flow.store.codec import RECEIPT_COLUMNS, receipts
from areal_flow.store.dataset import open_dataset
from areal_flow.store.ledger import Ledger
from areal_flow.store.visibility import trajectories_that_count
from areal_flow.types import TrajectoryReceipt

LEDGER_COLUMNS = ("step", "policy_version", "trajectory_ids", "discarded")
"""All of the ledger that `consumption_table` needs to be read."""

LOG_COLUMNS = ("trajectory_id", "writer_epoch")
"""All of the log that `consumption_table` needs to be read."""

_STATUSES = ("status", "step", "policy_version", "reason")


def consumption_table(steps: pa.Table, log: pa.Table) -> pa.Table:
    """Return one row a trajectory of the log, in its order.

    Args:
        steps: `LEDGER_COLUMNS` of the ledger.
        log: `LOG_COLUMNS` of the trajectories.

    Returns:
        `LOG_COLUMNS`, and `status` ("trained", "discarded" or "waiting"), `step` (the one whose row
        says so; null while it waits), `policy_version` (that this step started from) and `reason`
        (null unless discarded).
    """
    steps = steps.combine_chunks()
    statuses = pa.concat_tables([_trained(steps), _discarded(steps)])
    rows = pc.index_in(log["trajectory_id"], value_set=statuses["trajectory_id"].combine_chunks())
    columns = {name: statuses[name].take(rows) for name in _STATUSES}
    columns["status"] = pc.fill_null(columns["status"], "waiting")
    return pa.table({**{name: log[name] for name in LOG_COLUMNS}, **columns})


def read_unconsumed(
    trajectories: Path, writers: Path, ledger: Ledger
) -> tuple[Sequence[TrajectoryReceipt], CommittedGroups]:
    """Return the trajectories that no ledger row names, and the account of all that there are."""
    columns = {"submission_index", *RECEIPT_COLUMNS, *LOG_COLUMNS}
    stored = open_dataset(trajectories).to_table(
        columns=sorted(columns), filter=trajectories_that_count(writers)
    )
    statuses = consumption_table(ledger.table(list(LEDGER_COLUMNS)), stored)["status"]
    lengths = pc.struct_field(pc.list_flatten(stored["version_spans"]), "length")
    committed = CommittedGroups(
        submission_indices=frozenset(pc.unique(stored["submission_index"]).to_pylist()),
        num_tokens=pc.sum(lengths).as_py() or 0,
    )
    return receipts(stored.filter(pc.equal(statuses, "waiting"))), committed


def _trained(steps: pa.Table) -> pa.Table:
    parents = pc.list_parent_indices(steps["trajectory_ids"])
    identifiers = pc.list_flatten(steps["trajectory_ids"])
    return _with_status(
        steps, parents, identifiers, "trained", pa.nulls(len(identifiers), pa.string())
    )


def _discarded(steps: pa.Table) -> pa.Table:
    parents = pc.list_parent_indices(steps["discarded"])
    discards = pc.list_flatten(steps["discarded"])
    identifiers, reasons = (pc.struct_field(discards, name) for name in ("trajectory_id", "reason"))
    return _with_status(steps, parents, identifiers, "discarded", reasons)


def _with_status(
    steps: pa.Table, parents: pa.ChunkedArray, identifiers: pa.Array, status: str, reasons: pa.Array
) -> pa.Table:
    return pa.table(
        {
            "trajectory_id": identifiers,
            "status": pa.repeat(pa.scalar(status, pa.string()), len(identifiers)),
            "step": steps["step"].take(parents),
            "policy_version": steps["policy_version"].take(parents),
            "reason": reasons,
        }
    )
