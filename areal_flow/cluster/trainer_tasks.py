"""The Dask tasks of trainer ranks: supervised fine-tuning, then steps and snapshots.

Functions import torch themselves, since the driver imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from areal_flow.cluster.worker import WorkerContext, worker_context
from areal_flow.config import Recipe
from areal_flow.config.cluster import SLOW_STORAGE_BYTES_PER_S
from areal_flow.core.errors import DeviceError
from areal_flow.core.lease import Writer
from areal_flow.core.types import PolicyHashes, Rendezvous, StepRequest, StepResult
from areal_flow.log.inputs import reference_directory
from areal_flow.policy.checkpoints import checkpoint_path, list_checkpoints
from areal_flow.policy.weights.shared_memory import ChosenChannel

if TYPE_CHECKING:
    from areal_flow.log.trajectories import TrainingRows
    from areal_flow.training.rank import TrainerRank
    from areal_flow.training.replicas import ReplicaGroup
    from areal_flow.training.sft import SftTrainer

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

EXCHANGE_TIMEOUT_S = {"cpu": 3600.0, "cuda": 600.0}
"""On a CPU a rank may wait for minutes for the micro-batch of another one."""

SFT_CHUNK_S = 2.0
"""How long one task fine-tunes. Between tasks the driver shows progress and may stop."""


def on_device(task: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a task raise `DeviceError` when its GPU fails: the driver replaces the process."""

    @wraps(task)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return task(*args, **kwargs)
        except RuntimeError as error:
            from areal_flow.training.kernels import is_device_error

            if is_device_error(error):
                raise DeviceError(f"the trainer's device failed: {error}") from error
            raise

    return run


@on_device
def train_step(request: StepRequest) -> StepResult:
    rank = _rank()
    return _release_gpu(rank, rank.step(request))


def require_policy() -> None:
    _rank().require_policy()


def read_ahead(trajectory_ids: Sequence[str]) -> None:
    _rows(worker_context()).read_ahead(trajectory_ids)


@on_device
def begin_from_directory(directory: Path, rendezvous: Rendezvous) -> tuple[PolicyHashes, str]:
    """Stage version 0, from a fork's first checkpoint or from a pretrained policy."""
    from areal_flow.training.backend import numeric_environment

    rank = _connected(rendezvous, directory)
    if 0 in list_checkpoints(rank.layout.checkpoints):
        result = rank.restore(0), numeric_environment(rank.config, rank.replicas)
        return _release_gpu(rank, result)
    rank.load_pretrained(directory)
    return _release_gpu(rank, rank.stage_initial_policy())


@on_device
def take_snapshot(weights_hash: str, next_submission_index: int) -> None:
    """Copy this rank's part of the state with these weights."""
    _rank().snapshot(weights_hash=weights_hash, next_submission_index=next_submission_index)


@on_device
def write_snapshot(step: int) -> None:
    _rank().write_snapshot(step, _writer(worker_context()))


@on_device
def complete_snapshot(step: int) -> None:
    _rank().complete_snapshot(step, _writer(worker_context()))


@on_device
def restore_trainer(checkpoint_step: int, rendezvous: Rendezvous) -> PolicyHashes:
    """Connect to the other ranks, and load a checkpoint."""
    checkpoints = worker_context().layout.checkpoints
    rank = _connected(rendezvous, checkpoint_path(checkpoints, checkpoint_step))
    return _release_gpu(rank, rank.restore(checkpoint_step))


@on_device
def sft_chunk(source: Path, rendezvous: Rendezvous) -> tuple[int, dict[str, float]]:
    """Fine-tune for `SFT_CHUNK_S` from the newest checkpoint; the last step's is the result.

    Args:
        source: the model directory of step 0; without weights, they are drawn from the seed.
        rendezvous: where the ranks connect.

    Returns:
        How many steps were taken in all, and the metrics of the last one.
    """
    from areal_flow.training.sft import SftTrainer

    context, replicas = worker_context(), _connected(rendezvous, source).replicas
    settings = context.recipe.sft
    if (held := context.get(SftTrainer)) and held.backend.replicas is not replicas:
        context.drop(SftTrainer)
    trainer = context.ensure(SftTrainer, lambda: _make_sft_trainer(context, source, replicas))
    num_steps = settings.num_steps if len(trainer.rows) else 0
    began = monotonic()
    while trainer.step < num_steps and replicas.broadcast_flag(monotonic() - began < SFT_CHUNK_S):
        trainer.take_step()
        if trainer.step % settings.checkpoint_every_steps == 0:
            sft_checkpoint()
    if trainer.step >= num_steps:
        sft_checkpoint()
        context.drop(SftTrainer)
    return trainer.step, trainer.metrics[-1] if trainer.metrics else {}


@on_device
def sft_checkpoint() -> None:
    from areal_flow.training.sft import SftTrainer

    context = worker_context()
    layout, trainer = context.layout, context.get(SftTrainer)
    if trainer and trainer.step not in list_checkpoints(layout.sft_checkpoints):
        trainer.save(layout, _writer(context))


def _connected(rendezvous: Rendezvous, weights: Path) -> TrainerRank:
    """Return this process's rank, connected to the others of a replica group.

    Args:
        weights: the directory that they are about to load.
    """
    rank = _rank()
    if rendezvous.num_ranks > 1 and rank.replicas.name != rendezvous.name:
        from areal_flow.training.replicas import connect_ranks

        rank.replicas.leave()
        context = worker_context()
        point = context.layout.rendezvous_file(context.writer_epoch, rendezvous.name)
        device_type = rank.config.trainer.device.partition(":")[0]
        rank.replicas = connect_ranks(
            rendezvous,
            point,
            host=context.host,
            device_type=device_type,
            timeout_s=exchange_timeout_s(device_type, weights),
        )
    return rank


def exchange_timeout_s(device_type: str, weights: Path) -> float:
    """Return how long a rank waits for others, which may be for one that writes a checkpoint.

    A rank that dies or hangs is noticed sooner, by the driver.
    """
    num_bytes = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    return EXCHANGE_TIMEOUT_S[device_type] + num_bytes / SLOW_STORAGE_BYTES_PER_S


def _release_gpu(rank: TrainerRank, result: Result) -> Result:
    """Return a result once the GPU's memory is the generators', if both take turns."""
    if rank.config.takes_turns:
        rank.backend.free_memory()
    return result


def _rank() -> TrainerRank:
    from areal_flow.training.rank import TrainerRank

    context = worker_context()
    layout, rows = context.layout, _rows(context)

    def make() -> TrainerRank:
        _leave_generator_memory(context.recipe)
        root = layout.weights_of(context.writer_epoch)
        return TrainerRank(
            layout,
            context.recipe.for_trainer(),
            channel=ChosenChannel(root, context.recipe.weights_medium),
            read_rows=rows,
            find_teacher=partial(reference_directory, layout),
        )

    return context.ensure(TrainerRank, make)


def _leave_generator_memory(recipe: Recipe) -> None:
    """Keep this process from the memory of a vLLM that works beside it on the same GPU.

    A vLLM that starts again demands its whole part, which a trainer could have grown into.
    """
    from areal_flow.rollout.engines.registry import choose_engine
    from areal_flow.training.kernels import bound_memory

    beside = recipe.shares_gpu and not recipe.takes_turns
    if beside and choose_engine(recipe.generation).name == "vllm":
        bound_memory(1 - recipe.generation.vllm.gpu_memory_utilization)


def _rows(context: WorkerContext) -> TrainingRows:
    from areal_flow.log.trajectories import TrainingRows

    return context.ensure(TrainingRows, lambda: TrainingRows(context.layout))


def _writer(context: WorkerContext) -> Writer:
    return Writer(context.layout.writers, context.writer_epoch)


def _make_sft_trainer(context: WorkerContext, source: Path, replicas: ReplicaGroup) -> SftTrainer:
    from areal_flow.training.sft import CompletionRows, SftTrainer
    from areal_flow.training.supervised import OBJECTIVES
    from areal_flow.training.tensor_rows import first_model

    layout, recipe = context.layout, context.recipe
    objective = OBJECTIVES[recipe.sft.objective]
    model, weights = first_model(
        source,
        seed=recipe.seed,
        device=recipe.trainer.device,
        reward_model=layout.model if objective.makes_reward_model else None,
    )
    trainer = SftTrainer(
        model,
        CompletionRows.read(layout.sft_rows, num_completions=len(objective.fields)),
        recipe.sft,
        recipe.trainer,
        seed=recipe.seed,
        replicas=replicas,
        weights=weights,
    )
    trainer.restore(layout)
    return trainer
