"""The functions that run as Dask tasks. Small: each finds its worker's part and calls it.

`rollout`, `score` and `write` are the nodes of an episode's graph; a group's rows flow between them
as an Arrow table, see `areal_flow.store.codec`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from distributed import Worker, get_worker

from areal_flow.cluster.worker_context import WorkerContext, holder
from areal_flow.cluster.worker_roles import EpisodeRole, GeneratorRole, recipe_of, reward_role
from areal_flow.errors import ArealFlowError, SchemaError, TrainerLost
from areal_flow.generation.registry import engine_factory
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import Writer
from areal_flow.store.codec import (
    member_errors,
    receipts,
    rollout_notes,
    rollout_table,
    scored_table,
)
from areal_flow.types import (
    EngineStats,
    Episode,
    GroupReceipt,
    PolicyHashes,
    Rendezvous,
    StepRequest,
    StepResult,
)
from areal_flow.weights.directory import DirectoryWriter

if TYPE_CHECKING:
    from areal_flow.trainer.rank import TrainerRank


async def rollout(episodes: Sequence[Episode], version: int) -> pa.Table:
    """Run the workflow for some groups on this generator; what no workflow scored lacks its score.

    Raises:
        EngineError, WeightsError: the generator cannot serve.
        ArealFlowError: no member of any group has a trajectory; the message is the last cause.
    """
    of = holder()
    generator = _generator(of)
    role = of.ensure(EpisodeRole, lambda: EpisodeRole(of.run_directory, generator))
    started_at = datetime.now(UTC)
    groups = await role.run_groups(episodes, version)
    if not any(group.drafts for group in groups):
        raise ArealFlowError(groups[-1].errors[-1])
    return rollout_table(
        list(zip(episodes, groups, strict=True)),
        generator=generator.name,
        started_at=started_at,
        engine_stats=generator.stats(),
    )


async def score(table: pa.Table, episodes: Sequence[Episode]) -> pa.Table:
    """Score the rows of some groups on this reward worker, those that have no score yet."""
    role = await reward_role(holder())
    given = rollout_notes(table).scores
    prompts = {episode.submission_index: episode.prompt for episode in episodes}
    rows = table.select(["submission_index", "output_tokens"]).to_pylist()
    unscored = [
        (prompts[row["submission_index"]], row["output_tokens"])
        for row, known in zip(rows, given, strict=True)
        if known is None
    ]
    judged = iter(await role.score(unscored))
    scores = [known or next(judged) for known in given]
    return scored_table(table, scores, verifier=role.verifier_identity)


def write(tables: list[pa.Table]) -> list[GroupReceipt | SchemaError]:
    """Write scored groups beside the log; the driver will commit them.

    Validation costs about the same for one group or fifty, so groups that are ready together are
    validated together, and one by one only when that fails. Each is a fragment of its own, because
    each is committed once or not at all.
    """
    from areal_flow.store.trajectories import validate_groups

    try:
        validate_groups(tables)
    except SchemaError as error:
        return [error] if len(tables) == 1 else [write([table])[0] for table in tables]
    return [_write(table) for table in tables]


def _write(table: pa.Table) -> GroupReceipt:
    from areal_flow.store.trajectories import write_group

    fragments = write_group(RunLayout(holder().run_directory).trajectories, table)
    notes = rollout_notes(table)
    return GroupReceipt(
        submission_index=table["submission_index"][0].as_py(),
        fragments=fragments,
        trajectories=receipts(table),
        engine_stats=notes.engine_stats,
        member_errors=(*notes.errors, *member_errors(table)),
    )


async def load_weights(version: int, dask_worker: Worker) -> None:
    """Bring this generator to `version`; an engine that is yet to be made loads the newest itself.

    To make one takes half a minute on a busy machine, which nobody should wait for.

    For `client.run`, which goes past the queue of rollouts.
    """
    host = holder(dask_worker).get(GeneratorRole)
    if host is not None and host.is_serving:
        await host.serve(version)


async def import_engine(dask_worker: Worker) -> None:
    """Import what the engine needs, while there are no weights to load yet; for `client.run`.

    In a thread: on the event loop it would silence a healthy worker for as long as it takes, which
    was more than a minute on a machine with four busy processes a core.
    """
    engine = recipe_of(holder(dask_worker).run_directory).generation.engine
    await asyncio.to_thread(engine_factory, engine)


async def prepare_generator(dask_worker: Worker) -> None:
    """Load the engine now rather than at the first rollout; for `client.run`."""
    await _generator(holder(dask_worker)).serve(0)


def engine_stats(dask_worker: Worker) -> EngineStats:
    """Return what this generator's engine did so far; for `client.run`."""
    host = holder(dask_worker).get(GeneratorRole)
    return host.stats() if host else EngineStats()


def train_step(request: StepRequest) -> StepResult:
    """Compute one step on this trainer."""
    return trainer_rank().step(request)


def begin_from_directory(directory: Path) -> tuple[PolicyHashes, str]:
    """Make a pretrained policy version 0."""
    rank = trainer_rank()
    rank.load_pretrained(directory)
    return rank.genesis()


def take_snapshot(weights_hash: str, next_submission_index: int) -> None:
    """Copy this trainer's state for a checkpoint, if it is the one with these weights."""
    trainer_rank().snapshot(weights_hash=weights_hash, next_submission_index=next_submission_index)


async def write_snapshot(step: int, dask_worker: Worker) -> Path:
    """Write this trainer's snapshot as a checkpoint while it trains on; for `client.run`."""
    from areal_flow.trainer.rank import TrainerRank

    context = holder(dask_worker)
    rank = context.get(TrainerRank)
    if rank is None:
        raise TrainerLost(f"the snapshot of step {step} went with the trainer that took it")
    writer = Writer(RunLayout(context.run_directory).writers, context.writer_epoch)
    return await asyncio.to_thread(rank.write_snapshot, step, writer)


def restore_trainer(checkpoint_step: int, rendezvous: Rendezvous) -> PolicyHashes:
    """Join the other ranks, if there are any, and load a checkpoint into this one.

    Raises:
        TrainerLost: the other ranks did not come.
    """
    rank = trainer_rank()
    rank.replicas.leave()
    if rendezvous.num_ranks > 1:
        from areal_flow.trainer.replicas import GlooGroup

        of = holder()
        point = RunLayout(of.run_directory).rendezvous_file(of.writer_epoch, rendezvous.name)
        rank.replicas = GlooGroup(rendezvous, point, host=get_worker().ip)
    return rank.restore(checkpoint_step)


def _generator(of: WorkerContext) -> GeneratorRole:
    return of.ensure(
        GeneratorRole, lambda: GeneratorRole(of.run_directory, of.writer_epoch, of.worker_name)
    )


def trainer_rank() -> TrainerRank:
    """Return this worker's trainer rank; it holds no policy until it is given one."""
    from areal_flow.store.trajectories import TrainingRows
    from areal_flow.trainer.rank import TrainerRank

    of = holder()
    layout = RunLayout(of.run_directory)
    return of.ensure(
        TrainerRank,
        lambda: TrainerRank(
            layout,
            recipe_of(of.run_directory),
            channel=DirectoryWriter(layout.weights_of(of.writer_epoch)),
            read_rows=TrainingRows(layout.trajectories, layout.writers),
        ),
    )
