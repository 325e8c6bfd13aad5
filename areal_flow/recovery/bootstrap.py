"""The policy that a driver begins with: version 0 of a new run, or the newest one of an old run."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from areal_flow.config import Recipe
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.errors import RunError, TrainingError
from areal_flow.layout import RunLayout
from areal_flow.recovery.checkpoints import checkpoint_hashes, checkpoint_path, set_aside
from areal_flow.recovery.comparison import ComparedStep
from areal_flow.recovery.restore import RestorableTrainer, restore_newest
from areal_flow.store.ledger import Ledger
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a restored trainer stands; its hash differs from the ledger's after a fork."""

    weights_hash: str
    num_replayed: int


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
) -> Restored:
    """Bring all trainer ranks to the ledger's head and publish its weights.

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
    return Restored(replay.hashes.weights_hash, num_replayed=ledger.head - replay.checkpoint)


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
