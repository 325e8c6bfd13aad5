"""What the log holds that no step consumed: found by columns, so that a long past costs no memory.

Only the rows that are left become receipts; of all others ids, indices and lengths are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from areal_flow.recovery.plan import CommittedGroups
from areal_flow.store.codec import RECEIPT_COLUMNS, receipts
from areal_flow.store.consumption import LEDGER_COLUMNS, LOG_COLUMNS, consumption_table
from areal_flow.store.dataset import open_dataset
from areal_flow.store.ledger import Ledger
from areal_flow.store.visibility import trajectories_that_count
from areal_flow.types import TrajectoryReceipt


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
