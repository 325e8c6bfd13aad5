"""The functions that run as Dask tasks. Small: each finds its worker's part and calls it.

`rollout`, `score` and `write` are the nodes of an episode's graph; a group's rows flow between them
as an Arrow table whose metadata carries what is not a row.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from distributed import Worker, get_worker

from areal_flow.cluster.worker_context import WorkerContext, holder
from areal_flow.cluster.worker_roles import GeneratorRole, RewardRole, make_trainer_rank, meet
from areal_flow.controller.seeds import member_seed
from areal_flow.errors import SchemaError, TrainerLost
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import Writer
from areal_flow.store.codec import member_errors, receipts, rollout_table, scored_table
from areal_flow.types import (
    EngineStats,
    Episode,
    GroupReceipt,
    PolicyHashes,
    Prompt,
    Rendezvous,
    StepRequest,
    StepResult,
)

if TYPE_CHECKING:
    from areal_flow.trainer.rank import TrainerRank

_STATS = b"areal_flow.engine_stats"


async def rollout(episode: Episode, version: int) -> pa.Table:
    """Complete a group on this generator; the rows lack only their score."""
    host = _generator(holder())
    started_at = datetime.now(UTC)
    request_id = f"{episode.group_id}.{episode.attempt}"
    completions = await host.complete(request_id, episode.prompt.tokens, episode.seeds, version)
    table = rollout_table(episode, completions, generator=host.name, started_at=started_at)
    return table.replace_schema_metadata({_STATS: json.dumps(asdict(host.stats()))})


def score(table: pa.Table, prompt: Prompt) -> pa.Table:
    """Score a group on this reward worker."""
    host = _rewards(holder())
    scores = host.score(
        table["output_tokens"].to_pylist(), prompt=prompt.text, answer=prompt.answer
    )
    metadata = table.schema.metadata
    return scored_table(table, scores, verifier=host.verifier_identity).replace_schema_metadata(
        metadata
    )


def write(tables: list[pa.Table]) -> list[GroupReceipt | SchemaError]:
    """Write scored groups beside the log; the driver will commit them.

    Validation costs about the same for one group or fifty, so groups that are ready together are
    validated together, and one by one only when that fails. Each is a fragment of its own, because
    each is committed once or not at all.
    """
    from areal_flow.store.trajectories import validate_groups

    try:
        validate_groups(tables)
    except SchemaError:
        return [_validate_and_write(table) for table in tables]
    return [_write(table) for table in tables]


def _validate_and_write(table: pa.Table) -> GroupReceipt | SchemaError:
    from areal_flow.store.trajectories import validate_groups

    try:
        validate_groups([table])
    except SchemaError as error:
        return error
    return _write(table)


def _write(table: pa.Table) -> GroupReceipt:
    from areal_flow.store.trajectories import write_group

    fragments = write_group(RunLayout(holder().run_directory).trajectories, table)
    return GroupReceipt(
        submission_index=table["submission_index"][0].as_py(),
        fragments=fragments,
        trajectories=receipts(table),
        generator=table["generator"][0].as_py(),
        engine_stats=EngineStats(**json.loads(table.schema.metadata[_STATS])),
        member_errors=member_errors(table),
    )


async def answer(
    prompts: Sequence[Prompt], first_index: int, seed: int, version: int
) -> list[dict[str, Any]]:
    """Answer held-out prompts once each on this generator; returns tokens and finish reasons."""
    host = _generator(holder())
    completions = await asyncio.gather(
        *(
            host.complete(
                f"evaluation-{version}-{first_index + offset}",
                prompt.tokens,
                (member_seed(seed, first_index + offset, -1),),
                version,
            )
            for offset, prompt in enumerate(prompts)
        )
    )
    return [
        {
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.version_spans[-1].version,
        }
        for (completion,) in completions
    ]


def grade(
    answers: Sequence[dict[str, Any]], prompts: Sequence[Prompt], evaluation: str
) -> list[dict[str, Any]]:
    """Grade answers on this reward worker; returns rows of the evaluation schema."""
    host = _rewards(holder())
    texts = host.texts([answer["tokens"] for answer in answers])
    rows = []
    for prompt, answered, text in zip(prompts, answers, texts, strict=True):
        (score_,) = host.score([answered["tokens"]], prompt=prompt.text, answer=prompt.answer)
        rows.append(
            {
                "evaluation": evaluation,
                "policy_version": answered["policy_version"],
                "prompt_id": prompt.prompt_id,
                "difficulty": prompt.difficulty,
                "prompt": prompt.text,
                "completion": text,
                "answer": prompt.answer,
                "num_output_tokens": len(answered["tokens"]),
                "finish_reason": answered["finish_reason"],
                "reward": score_.reward,
                "reward_detail": json.dumps({"verdict": score_.verdict, "error": score_.error}),
                "evaluated_at": datetime.now(UTC),
            }
        )
    return rows


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
    await asyncio.to_thread(importlib.import_module, "areal_flow.generation.torch_engine")


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
    """Join the other ranks, if there are any, and load a checkpoint into this one."""
    rank = trainer_rank()
    rank.leave()
    if rendezvous.num_ranks > 1:
        context = holder()
        place = (context.run_directory, context.writer_epoch)
        rank.join(meet(*place, rendezvous, host=get_worker().ip))
    return rank.restore(checkpoint_step)


def _generator(of: WorkerContext) -> GeneratorRole:
    return of.ensure(
        GeneratorRole, lambda: GeneratorRole(of.run_directory, of.writer_epoch, of.worker_name)
    )


def _rewards(of: WorkerContext) -> RewardRole:
    return of.ensure(RewardRole, lambda: RewardRole(of.run_directory))


def trainer_rank() -> TrainerRank:
    """Return this worker's trainer rank."""
    from areal_flow.trainer.rank import TrainerRank

    context = holder()
    return context.ensure(
        TrainerRank, lambda: make_trainer_rank(context.run_directory, context.writer_epoch)
    )
