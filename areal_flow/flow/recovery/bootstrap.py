"""What a driver begins with: a run directory that is its own, and the policy of a new or old run.

While an earlier driver is alive, a fence notes where the logs stood: what it still writes does not
count. Once all are dead, unfinished writes are removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Fence, Writer, is_sole_writer, record_fence
from areal_flow.core.types import PolicyHashes
from areal_flow.flow.recovery.restore import ComparedStep, RestorableTrainer, restore_newest
from areal_flow.log.dataset import open_dataset, remove_orphans
from areal_flow.log.ledger import LedgerReader
from areal_flow.policy.checkpoints import (
    checkpoint_hashes,
    checkpoint_path,
    forked_policies,
    move_damaged_checkpoint,
    record_fork,
)
from areal_flow.policy.weights.channel import WeightsWriter
from areal_flow.policy.weights.shared_memory import free_segments

logger = logging.getLogger(__name__)


def take_over(layout: RunLayout, writer: Writer) -> None:
    """Make a run directory this writer's; only what is older than its lease is removed."""
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


async def restore_policy(
    trainer: RestorableTrainer,
    layout: RunLayout,
    recipe: Recipe,
    ledger: LedgerReader,
    channel: WeightsWriter,
    *,
    on_replayed: Callable[[int, int], None],
) -> tuple[PolicyHashes, int]:
    """Restore the ledger's head; return the policy and how many steps were replayed."""
    replay = await restore_newest(
        trainer,
        ledger,
        checkpoint_hashes(layout.checkpoints),
        forks=forked_policies(layout.forks),
        at_most=ledger.head,
        max_staleness=recipe.controller.max_staleness,
        on_damaged=lambda step, e: move_damaged_checkpoint(
            checkpoint_path(layout.checkpoints, step), e
        ),
    )
    if replay is None:
        raise RunError(
            f"{layout.name} has no complete checkpoint that its ledger knows: it stopped before "
            "training began. Remove it and start again"
        )
    num_steps = ledger.head - replay.checkpoint
    while replay.step < ledger.head:
        note_fork(layout, await replay.advance())
        on_replayed(replay.step - replay.checkpoint, num_steps)
    await asyncio.to_thread(channel.publish, ledger.head)
    return replay.hashes, num_steps


def note_fork(layout: RunLayout, compared: ComparedStep) -> None:
    """Record a replayed step that made another policy than the ledger has, or refuse it.

    In the same numeric environment of a CPU hashes must be equal. Elsewhere the run goes on
    from the fork, which is appended to forks.jsonl.
    """
    if not compared.forked:
        return
    fork = {
        "step": compared.step,
        "recorded": asdict(compared.recorded.hashes),
        "replayed": asdict(compared.replayed.hashes),
        "recorded_on": json.loads(compared.recorded.numeric_environment),
        "replayed_on": json.loads(compared.replayed.numeric_environment),
        "at": datetime.now(UTC).isoformat(),
    }
    message = "step {step} replayed to {replayed}, the ledger has {recorded}".format(**fork)
    if compared.refused:
        raise TrainingError(f"{message}, in the same numeric environment")
    where = "recorded on {recorded_on}, replayed on {replayed_on}".format(**fork)
    logger.warning("fork: %s; %s", message, where)
    record_fork(layout.forks, fork)
