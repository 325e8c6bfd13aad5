"""What the log holds that no step consumed: found by columns, so that a long past costs no memory.

Only the rows that are left become receipts; of all others ids, indices and lengths are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.controller.recovery import CommittedGroups
from areal_flow.store.codec import RECEIPT_COLUMNS, receipts
from areal_flow.store.dataset import open_dataset
from areal_flow.store.ledger import Ledger
from areal_flow.store.visibility import trajectories_that_count
from areal_flow.types import TrajectoryReceipt


def read_unconsumed(
    trajectories: Path, writers: Path, ledger: Ledger
) -> tuple[Sequence[TrajectoryReceipt], CommittedGroups]:
    """Return the trajectories that no ledger row names, and the account of all that there are."""
    stored = open_dataset(trajectories).to_table(
        columns=["submission_index", *RECEIPT_COLUMNS], filter=trajectories_that_count(writers)
    )
    left = pc.invert(pc.is_in(stored["trajectory_id"], value_set=consumed_ids(ledger)))
    lengths = pc.struct_field(pc.list_flatten(stored["version_spans"]), "length")
    committed = CommittedGroups(
        submission_indices=frozenset(pc.unique(stored["submission_index"]).to_pylist()),
        num_tokens=pc.sum(lengths).as_py() or 0,
    )
    return receipts(stored.filter(left)), committed


def consumed_ids(ledger: Ledger) -> pa.Array:
    """Return the ids of every trajectory that a step trained or that was discarded."""
    table = ledger.table(["trajectory_ids", "discarded"]).combine_chunks()
    discarded = pc.struct_field(pc.list_flatten(table["discarded"]), "trajectory_id")
    chunks = [*pc.list_flatten(table["trajectory_ids"]).chunks, *discarded.chunks]
    return pa.chunked_array(chunks, pa.string()).combine_chunks()
