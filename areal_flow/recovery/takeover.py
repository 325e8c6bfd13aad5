"""Makes a run directory safe for the driver that resumes it, once that driver holds the lease.

While an earlier driver is alive, and may wake up, a fence notes where the logs stood, so that
nothing it still writes counts. Once all are dead, what they wrote and no log names is removed.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import Writer, is_sole_writer, record_fence
from areal_flow.store.dataset import open_dataset
from areal_flow.store.evaluations import num_evaluation_rows
from areal_flow.store.ledger import Ledger
from areal_flow.store.maintenance import remove_orphans

logger = logging.getLogger(__name__)


def take_over(layout: RunLayout, writer: Writer) -> None:
    """Make a run directory this writer's, before it writes anything else.

    Only what is older than its lease is removed: it may itself hang here and be taken over.

    Raises:
        RunError: another driver took over already.
    """
    writer.check_current()
    if not is_sole_writer(writer):
        watermark = open_dataset(layout.trajectories).count_rows()
        head = Ledger(layout.steps, writer).head
        record_fence(
            writer,
            trajectory_watermark=watermark,
            step=head,
            evaluation_watermark=num_evaluation_rows(layout.evaluations),
        )
        return
    for dataset in (layout.trajectories, layout.steps):
        if num_removed := remove_orphans(dataset, written_before=writer.began_at):
            logger.info("removed %d files that no version of %s names", num_removed, dataset.name)
    for leftover in _leftovers(layout, before=writer.writer_epoch):
        shutil.rmtree(leftover, ignore_errors=True)


def _leftovers(layout: RunLayout, *, before: int) -> list[Path]:
    """Return weights, rendezvous points and half-written checkpoints of earlier epochs."""
    candidates = [
        *layout.weights.glob("[0-9]*"),
        *layout.rendezvous.glob("[0-9]*"),
        *layout.checkpoints.glob(".partial-*"),
    ]
    return [path for path in candidates if int(path.name.rpartition("-")[2]) < before]
