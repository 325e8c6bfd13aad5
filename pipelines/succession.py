"""What a driver does with the run directory of the one before it, once it holds the claim.

While any earlier driver is alive, and may wake up, a floor says where the logs stood, so that
nothing it still writes counts. Once all are dead this one cleans up: whatever was written and not
yet named by a log is an orphan now.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from areal_flow.layout import RunLayout
from areal_flow.store.dataset import open_dataset, remove_orphans
from areal_flow.store.ledger import Ledger
from areal_flow.writers import Writer, is_sole_writer, record_floor

logger = logging.getLogger(__name__)


def succeed(layout: RunLayout, writer: Writer) -> None:
    """Make a run directory this writer's, before anything else of its life is written."""
    if not is_sole_writer(writer):
        watermark = open_dataset(layout.trajectories).count_rows()
        head = Ledger(layout.steps, writer).head
        record_floor(writer, trajectory_watermark=watermark, step=head)
        return
    num_bytes = remove_orphans(open_dataset(layout.trajectories))
    num_bytes += remove_orphans(open_dataset(layout.steps))
    if num_bytes:
        logger.info("removed %d bytes that no version of the logs names", num_bytes)
    for leftover in _leftovers(layout, writer):
        shutil.rmtree(leftover, ignore_errors=True)


def _leftovers(layout: RunLayout, writer: Writer) -> list[Path]:
    own = layout.weights_of(writer.writer_epoch)
    weights = [path for path in layout.weights.glob("*") if path != own]
    return [*weights, *layout.checkpoints.glob(".partial-*")]
