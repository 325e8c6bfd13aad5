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
from areal_flow.store.dataset import open_dataset, trajectories_that_count
from areal_flow.store.ledger import Ledger
from areal_flow.types import TrajectoryReceipt

LEDGER_COLUMNS = ("step", "policy_version", "trajectory_ids", "discarded")
"""All of the ledger that `consumption_table` needs to be read."""

LOG_COLUMNS = ("trajectory_id", "writer_epoch")
"""All of the log that `consumption_table` needs to be read."""

CONSUMED = """
SELECT step, policy_version, unnest(trajectory_ids) AS trajectory_id, 'trained' AS status,
       NULL::VARCHAR AS reason
FROM steps
UNION ALL
SELECT step, policy_version, discard.trajectory_id, 'discarded', discard.reason
FROM (SELECT step, policy_version, unnest(discarded) AS discard FROM steps)
"""
"""What consumed means, in SQL: a row for each time that a row of `steps` names a trajectory."""

_STATUSES = f"""
SELECT log.trajectory_id, log.writer_epoch, coalesce(status, 'waiting') AS status, step,
       policy_version, reason
FROM log LEFT JOIN (
    FROM ({CONSUMED})
    QUALIFY row_number() OVER (PARTITION BY trajectory_id ORDER BY status DESC, step) = 1
) USING (trajectory_id)
ORDER BY log.position
"""


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
    import duckdb

    log = log.select(LOG_COLUMNS).append_column("position", pa.array(range(len(log)), pa.int64()))
    with duckdb.connect() as connection:
        connection.register("steps", steps.select(LEDGER_COLUMNS))
        connection.register("log", log)
        return connection.sql(_STATUSES).to_arrow_table()


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
