"""Supervised fine-tuning on the trainer worker, in chunks that leave room for a stop."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from areal_flow.cluster.worker_context import WorkerContext, holder
from areal_flow.cluster.worker_roles import recipe_of
from areal_flow.layout import RunLayout
from areal_flow.recovery.checkpoints import list_checkpoints
from areal_flow.recovery.lease import Writer

if TYPE_CHECKING:
    from areal_flow.trainer.sft import SftTrainer

CHUNK_S = 2.0
"""How long one task computes, in seconds: the driver is told, and may stop, in between."""


def sft_chunk(source: Path) -> tuple[int, float]:
    """Take steps for a while; return how many were taken in all, and the last one's loss.

    A worker that has no trainer yet goes on from the newest checkpoint. The last step's checkpoint
    is the result; the trainer is then forgotten.

    Args:
        source: the model directory of step 0; without weights, they are drawn from the seed.

    Raises:
        TrainingError: a step could not be computed.
    """
    from areal_flow.trainer.sft import SftTrainer

    of = holder()
    trainer = of.ensure(SftTrainer, lambda: _make_trainer(of.run_directory, source))
    settings = recipe_of(of.run_directory).sft
    num_steps = settings.num_steps if len(trainer.rows) else 0
    began, loss = monotonic(), float("nan")
    while trainer.step < num_steps and monotonic() - began < CHUNK_S:
        loss = trainer.take_step()
        if trainer.step % settings.checkpoint_every_steps == 0:
            _save(of, trainer)
    if trainer.step >= num_steps:
        _save(of, trainer)
        of.drop(SftTrainer)
    return trainer.step, loss


def sft_checkpoint() -> None:
    """Write a checkpoint of where supervised fine-tuning stands, if it stands anywhere."""
    from areal_flow.trainer.sft import SftTrainer

    of = holder()
    if trainer := of.get(SftTrainer):
        _save(of, trainer)


def _save(of: WorkerContext, trainer: SftTrainer) -> None:
    layout = RunLayout(of.run_directory)
    if trainer.step not in list_checkpoints(layout.sft_checkpoints):
        layout.sft_checkpoints.mkdir(parents=True, exist_ok=True)
        trainer.save(layout.sft_checkpoints, layout.model, Writer(layout.writers, of.writer_epoch))


def _make_trainer(run_directory: Path, source: Path) -> SftTrainer:
    from areal_flow.trainer.sft import CompletionRows, SftTrainer

    layout, recipe = RunLayout(run_directory), recipe_of(run_directory)
    trainer = SftTrainer(
        _initial_policy(source, seed=recipe.seed, device=recipe.trainer.device),
        CompletionRows.read(layout.sft_rows),
        recipe.sft,
        recipe.trainer,
        seed=recipe.seed,
    )
    trainer.restore(layout.sft_checkpoints)
    return trainer


def _initial_policy(source: Path, *, seed: int, device: str) -> Any:
    import torch

    from areal_flow.models.policy import empty_policy, load_policy

    if any(source.glob("*.safetensors")):
        return load_policy(source, device=device)
    torch.manual_seed(seed)
    return empty_policy(source, device=device)
