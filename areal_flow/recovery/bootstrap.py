"""What a driver begins with: a run directory that is its own, and the policy of a new or old run.

While an earlier driver is alive, and may wake up, a fence notes where the logs stood, so that
nothing it still writes counts. Once all are dead, what they wrote and no log names is removed.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from areal_flow.config import Recipe
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.errors import RunError, TrainingError
from areal_flow.layout import RunLayout
from areal_flow.recovery.checkpoints import checkpoint_hashes, checkpoint_path, set_aside
from areal_flow.recovery.comparison import ComparedStep
from areal_flow.recovery.lease import Writer, is_sole_writer, record_fence
from areal_flow.recovery.restore import RestorableTrainer, restore_newest
from areal_flow.store.dataset import open_dataset
from areal_flow.store.ledger import Ledger
from areal_flow.store.maintenance import remove_orphans
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter

logger = logging.getLogger(__name__)


def take_over(layout: RunLayout, writer: Writer) -> None:
    """Make a run directory this writer's, before it writes anything else.

    Only what is older than its lease is removed: it may itself hang here and be taken over.

    Raises:
        RunError: another driver took over already.
    """
    writer.check_current()
    if not is_sole_writer(writer):
        evaluations = layout.evaluations
        record_fence(
            writer,
            trajectory_watermark=open_dataset(layout.trajectories).count_rows(),
            step=Ledger(layout.steps, writer).head,
            evaluation_watermark=open_dataset(evaluations).count_rows()
            if evaluations.exists()
            else 0,
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


def commit_genesis(
    ledger: Ledger,
    channel: WeightsWriter,
    begun: tuple[PolicyHashes, str],
    provenance: Provenance,
    seconds: float,
) -> None:
    """Write row 0, with the seconds that version 0 took to make, and publish version 0."""
    hashes, environment = begun
    row = genesis_row(hashes, provenance=provenance, numeric_environment=environment)
    ledger.append({**row, "seconds_train": seconds})
    channel.publish(0)


async def restore_policy(
    trainer: RestorableTrainer,
    layout: RunLayout,
    recipe: Recipe,
    ledger: Ledger,
    channel: WeightsWriter,
) -> tuple[str, int]:
    """Bring all trainer ranks to the ledger's head and publish its weights.

    Returns:
        The hash of the weights, another than the ledger's after a fork, and how many steps were
        replayed.

    Raises:
        RunError: there is no usable checkpoint.
        TrainerLost: a rank died meanwhile.
        TrainingError: a replayed step made other weights in the recorded numeric environment.
    """

    def move_aside(checkpoint: int, error: TrainingError) -> None:
        aside = set_aside(checkpoint_path(layout.checkpoints, checkpoint))
        logger.warning("%s; moved to %s, trying an older one", error, aside)

    replay = await restore_newest(
        trainer,
        ledger,
        checkpoint_hashes(layout.checkpoints),
        at_most=ledger.head,
        max_staleness=recipe.controller.max_staleness,
        on_damaged=move_aside,
    )
    if replay is None:
        raise RunError(
            f"{layout.name} has no complete checkpoint that its ledger knows: it stopped before "
            "training began. Remove it and start again"
        )
    while replay.step < ledger.head:
        note_fork(layout, await replay.advance())
    channel.publish(ledger.head)
    return replay.hashes.weights_hash, ledger.head - replay.checkpoint


def note_fork(layout: RunLayout, compared: ComparedStep) -> None:
    """Record a replayed step that made another policy than the ledger has, or refuse it.

    Where the recorded numeric environment is this one, and it is a CPU's, hashes must be equal.
    Elsewhere a difference is a fork: appended to forks.jsonl, and the run goes on from it.

    Raises:
        TrainingError: hashes differ where they must not.
    """
    if not compared.forked:
        return
    recorded, replayed = asdict(compared.recorded.hashes), asdict(compared.replayed.hashes)
    message = f"step {compared.step} replayed to {replayed}, the ledger has {recorded}"
    if compared.refused:
        raise TrainingError(f"{message}, in the same numeric environment")
    there = json.loads(compared.recorded.numeric_environment)
    here = json.loads(compared.replayed.numeric_environment)
    logger.warning("fork: %s; recorded on %s, replayed on %s", message, there, here)
    fork = {
        "step": compared.step,
        "recorded": recorded,
        "replayed": replayed,
        "recorded_on": there,
        "replayed_on": here,
        "at": datetime.now(UTC).isoformat(),
    }
    with layout.forks.open("a") as file:
        file.write(json.dumps(fork) + "\n")
