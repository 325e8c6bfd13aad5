"""Version 0 of a new run, or the newest version of an old one: the trainer made ready.

A resumed run loads its newest good checkpoint and trains the ledger's later rows again from the
log, comparing every hash; nothing is generated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from areal_flow.cluster import tasks
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.cluster.warm_start import begin_from_warm_start, warm_start_chunk
from areal_flow.config import TINY_MODEL, Recipe
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.errors import RunError, TrainerLost, TrainingError
from areal_flow.layout import RunLayout
from areal_flow.models.directory import resolve_model
from areal_flow.recovery.checkpoints import checkpoint_hashes, checkpoint_path, set_aside
from areal_flow.recovery.comparison import bits_must_agree
from areal_flow.recovery.plan import choose_checkpoint, request_from_row
from areal_flow.store.ledger import Ledger
from areal_flow.types import PolicyHashes, StepResult
from areal_flow.weights.channel import WeightsWriter
from pipelines.cli.progress import Progress

logger = logging.getLogger(__name__)

WARM_START_CHUNK_STEPS = 50


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a restored trainer stands; its hash differs from the ledger's after a fork."""

    weights_hash: str
    num_replayed: int


async def begin_policy(
    replicas: TrainerReplicas, recipe: Recipe, progress: Progress
) -> tuple[PolicyHashes, str]:
    """Make version 0 on the leader: a pretrained directory, or a warm-started tiny policy."""
    if recipe.model != TINY_MODEL:
        return await replicas.lead(tasks.begin_from_directory, resolve_model(recipe.model))  # type: ignore[no-any-return]
    num_steps, taken = recipe.warm_start.num_steps, 0
    while taken < num_steps:
        taken, loss = await replicas.lead(warm_start_chunk, WARM_START_CHUNK_STEPS)
        progress.update(f"warm start {taken}/{num_steps}, loss {loss:.3f}")
    return await replicas.lead(begin_from_warm_start)  # type: ignore[no-any-return]


async def commit_genesis(
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
    replicas: TrainerReplicas,
    layout: RunLayout,
    recipe: Recipe,
    ledger: Ledger,
    channel: WeightsWriter,
) -> Restored:
    """Bring all ranks to the ledger's head and publish it.

    The newest checkpoint that can be read is loaded; the ledger's later rows are trained again.

    Raises:
        RunError: there is no usable checkpoint.
        TrainingError: a replayed step made other weights in the recorded numeric environment.
    """
    checkpoint, hashes = await _restore_checkpoint(replicas, layout, ledger.rows(["weights_hash"]))
    for row in ledger.rows(since=checkpoint + 1):
        request = request_from_row(
            row,
            parent_hash=hashes.weights_hash,
            max_staleness=recipe.controller.max_staleness,
        )
        replayed = await replicas.step(request)
        after_fork = request.parent_hash != row["parent_hash"]
        note_fork(layout, row, replayed, after_fork=after_fork)
        hashes = replayed.hashes
    channel.publish(ledger.head)
    return Restored(hashes.weights_hash, num_replayed=ledger.head - checkpoint)


async def _restore_checkpoint(
    replicas: TrainerReplicas, layout: RunLayout, rows: Sequence[dict[str, Any]]
) -> tuple[int, PolicyHashes]:
    usable = checkpoint_hashes(layout.checkpoints)
    while (checkpoint := choose_checkpoint(usable, rows)) is not None:
        try:
            return checkpoint, await replicas.restore(checkpoint)
        except TrainerLost:
            raise
        except TrainingError as error:
            aside = set_aside(checkpoint_path(layout.checkpoints, checkpoint))
            logger.warning("%s; moved to %s, trying an older one", error, aside)
            del usable[checkpoint]
    raise RunError(
        f"{layout.name} has no complete checkpoint that its ledger knows: it stopped before "
        "training began. Remove it and start again"
    )


def note_fork(
    layout: RunLayout, row: dict[str, Any], replayed: StepResult, *, after_fork: bool = False
) -> None:
    """Compare a replayed step with its row; record and say a difference, or refuse it.

    Where the recorded numeric environment is this one, and it is a CPU's, hashes must be equal.
    Elsewhere a difference is a fork: appended to forks.jsonl, and the run goes on from it.

    Args:
        after_fork: the step started from other weights than the recorded one did.

    Raises:
        TrainingError: hashes differ where they must not.
    """
    found = asdict(replayed.hashes)
    recorded = {name: row[name] for name in found}
    if found == recorded:
        return
    message = f"step {row['step']} replayed to {found}, the ledger has {recorded}"
    same = bits_must_agree(row["numeric_environment"], replayed.numeric_environment)
    if same and not after_fork:
        raise TrainingError(f"{message}, in the same numeric environment")
    here, there = json.loads(replayed.numeric_environment), json.loads(row["numeric_environment"])
    logger.warning("fork: %s; recorded on %s, replayed on %s", message, there, here)
    fork = {
        "step": row["step"],
        "recorded": recorded,
        "replayed": found,
        "recorded_on": there,
        "replayed_on": here,
        "at": datetime.now(UTC).isoformat(),
    }
    with layout.forks.open("a") as file:
        file.write(json.dumps(fork) + "\n")
