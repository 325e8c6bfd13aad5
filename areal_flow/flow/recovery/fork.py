"""Makes the first checkpoint of a run from a recorded step of another one, its parent.

The step is loaded from its checkpoint, or replayed from the nearest earlier one. Nothing is written
into the parent, which may be running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.flow.recovery.replay import LocalTrainer, threads_kept
from areal_flow.flow.recovery.replay_settings import on_device, on_this_machine
from areal_flow.flow.recovery.restore import LedgerReplay
from areal_flow.log.directory import Parent, check_schema_version, record_parent
from areal_flow.policy.checkpoints import CheckpointState, checkpoint_hashes
from areal_flow.training.checkpoint import take_snapshot, write_checkpoint


async def write_version_0(
    layout: RunLayout,
    recipe: Recipe,
    writer: Writer,
    *,
    parent: RunLayout,
    step: int | None,
    fresh_optimizer: str,
    on_replayed: Callable[[int, int], None],
) -> None:
    """Write checkpoint 0 of a new run from a parent's step, by default its newest checkpoint's."""
    checkpoints = checkpoint_hashes(parent.checkpoints)
    parent_recipe = on_this_machine(load_recipe(parent.config))
    if step is None or step in checkpoints:
        parent_recipe = on_device(
            parent_recipe, "cpu"
        )  # only copied: the run's own workers need the GPUs
    local = LocalTrainer(parent, parent_recipe)
    last = local.ledger.head if step is None else step
    with threads_kept():
        replay = await local.begin(checkpoints, at_most=last)
        if replay is None:
            raise RunError(
                f"run {parent.name} has no usable checkpoint up to step {last}: expected one that "
                "can be read and holds the weights of its ledger row, found checkpoints of steps "
                f"{', '.join(map(str, checkpoints)) or 'none'}"
            )
        if step is not None:
            await _replay(replay, parent, step=step, on_replayed=on_replayed)
    weights_hash = replay.hashes.weights_hash
    description = CheckpointState(0, weights_hash, 0, recipe.digest())
    snapshot = take_snapshot(local.rank.backend, description, recipe.trainer.lora)
    if fresh_optimizer:
        snapshot = replace(snapshot, optimizer={})
    write_checkpoint(layout.checkpoints, parent.model, snapshot, writer)
    run_id, optimizer = check_schema_version(parent), fresh_optimizer or "kept"
    record_parent(layout, Parent(run_id, parent.name, replay.step, weights_hash, optimizer))


async def _replay(
    replay: LedgerReplay, parent: RunLayout, *, step: int, on_replayed: Callable[[int, int], None]
) -> None:
    while replay.step < step:
        on_replayed(replay.step + 1, step)
        compared = await replay.advance()
        if compared.forked:
            raise RunError(
                f"step {compared.step} of run {parent.name} was replayed to weights "
                f"{compared.replayed.hashes.weights_hash}, its ledger has "
                f"{compared.recorded.hashes.weights_hash}: expected the same; fork from a step "
                "with a checkpoint, "
                f"{', '.join(map(str, checkpoint_hashes(parent.checkpoints)))}"
            )
