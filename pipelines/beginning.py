"""Version 0 of a new run, or the newest version of an old one: the trainer made ready.

A resumed run loads its newest good checkpoint and trains the ledger's later rows again from the
log, comparing every hash; nothing is generated.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from distributed import Client

from areal_flow.checkpoints import checkpoint_path, list_checkpoints, read_checkpoint_state
from areal_flow.cluster import tasks
from areal_flow.cluster.adapters import on_trainer
from areal_flow.cluster.warm_start import begin_from_warm_start, warm_start_chunk
from areal_flow.config import TINY_MODEL, Recipe
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.controller.recovery import choose_checkpoint, request_from_row
from areal_flow.errors import RunError, TrainingError
from areal_flow.layout import RunLayout
from areal_flow.modeling.directory import resolve_model
from areal_flow.store.ledger import Ledger
from areal_flow.types import PolicyHashes, StepResult
from areal_flow.weights.channel import WeightsChannel
from pipelines.progress import Progress

logger = logging.getLogger(__name__)

WARM_START_CHUNK_STEPS = 50


async def begin_policy(
    client: Client, recipe: Recipe, progress: Progress
) -> tuple[PolicyHashes, str]:
    """Make version 0 on the trainer: a pretrained directory, or a warm-started tiny policy."""
    if recipe.model != TINY_MODEL:
        return await on_trainer(client, tasks.begin_from_directory, resolve_model(recipe.model))  # type: ignore[no-any-return]
    num_steps, taken = recipe.warm_start.num_steps, 0
    while taken < num_steps:
        taken, loss = await on_trainer(client, warm_start_chunk, WARM_START_CHUNK_STEPS)
        progress.update(f"warm start {taken}/{num_steps}, loss {loss:.3f}")
    return await on_trainer(client, begin_from_warm_start)  # type: ignore[no-any-return]


async def commit_genesis(
    ledger: Ledger,
    channel: WeightsChannel,
    begun: tuple[PolicyHashes, str],
    provenance: Provenance,
) -> None:
    """Write row 0 and publish version 0."""
    hashes, environment = begun
    ledger.append(genesis_row(hashes, provenance=provenance, numeric_environment=environment))
    channel.publish(0)


async def restore_policy(
    client: Client, layout: RunLayout, recipe: Recipe, ledger: Ledger, channel: WeightsChannel
) -> int:
    """Bring the trainer to the ledger's head and publish it; return how many steps were replayed.

    Raises:
        RunError: there is no usable checkpoint.
        TrainingError: a replayed step made other weights in the recorded numeric environment.
    """
    rows = ledger.rows()
    checkpoint = choose_checkpoint(_checkpoint_hashes(layout), rows)
    if checkpoint is None:
        raise RunError(
            f"{layout.name} has no complete checkpoint that its ledger knows: it stopped before "
            "training began. Remove it and start again"
        )
    await on_trainer(client, tasks.restore_trainer, checkpoint)
    for row in rows[checkpoint + 1 :]:
        request = request_from_row(row, max_staleness=recipe.controller.max_staleness)
        compare_replay(row, await on_trainer(client, tasks.train_step, request))
    channel.publish(len(rows) - 1)
    return len(rows) - 1 - checkpoint


def compare_replay(row: dict[str, Any], replayed: StepResult) -> None:
    """Refuse a replay that differs where it must not; say it where it may.

    Raises:
        TrainingError: hashes differ though the numeric environment is the recorded one.
    """
    if replayed.hashes.weights_hash == row["weights_hash"]:
        return
    recorded = json.loads(row["numeric_environment"])
    found = json.loads(replayed.numeric_environment)
    message = (
        f"step {row['step']} replayed to weights {replayed.hashes.weights_hash}, the ledger has "
        f"{row['weights_hash']}"
    )
    if recorded == found:
        raise TrainingError(f"{message}, in the same numeric environment")
    raise TrainingError(
        f"{message}; the numeric environment differs: recorded {recorded}, found {found}. "
        "Resume where the run was made"
    )


def _checkpoint_hashes(layout: RunLayout) -> dict[int, str]:
    return {
        step: read_checkpoint_state(checkpoint_path(layout.checkpoints, step)).weights_hash
        for step in list_checkpoints(layout.checkpoints)
    }
