"""Writes runs with any number of trajectories: synthetic groups, committed as real ones are.

Rows are made by columns. Each batch is committed one step before a ledger row consumes it, so that
the last one waits. Prompts, seeds, hashes, token accounting and checkpoint 0 are right, so that an
audit finds nothing; weights of later steps do not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.config import build_recipe, dump_recipe, load_recipe
from areal_flow.core.layout import SCHEMA_VERSION, RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.program import CODE_VERSION
from areal_flow.core.types import (
    GroupReceipt,
    PolicyHashes,
    StepMetrics,
    StepRequest,
    StepResult,
    group_id,
    trajectory_id,
)
from areal_flow.log.codec import TRAJECTORIES, content_hashes, receipts
from areal_flow.log.directory import create_run, hold_run
from areal_flow.log.inputs import read_inputs
from areal_flow.log.ledger_row import (
    Provenance,
    StepEntries,
    batch_digest,
    genesis_row,
    member_seed,
    step_row,
)
from areal_flow.log.run_log import RunLog
from areal_flow.log.trajectories import validate_groups, write_groups
from areal_flow.rollout.prompts.table import PromptTable

CHECKPOINT_EVERY_STEPS = 20
AT = datetime(2026, 1, 1, tzinfo=UTC)
_DETAILS = '{"verdict": "incorrect"}', '{"verdict": "correct"}'


@dataclass(frozen=True, slots=True)
class LogShape:
    """The sizes of a synthetic log."""

    num_steps: int = 1250
    batch_size: int = 8192
    group_size: int = 16
    num_tokens: int = 64
    """Of each completion."""
    max_rows_per_commit: int = 512


@dataclass(slots=True)
class WrittenLog:
    """What writing a log took."""

    num_rows: int = 0
    payload_bytes: int = 0
    """Of the rows in memory."""
    commit_s: list[float] = field(default_factory=list)
    append_s: list[float] = field(default_factory=list)
    """The same, of ledger rows."""


def make_empty_run(root: Path, shape: LogShape) -> RunLayout:
    """Prepare a run of the default job's prompts without fine-tuning and held-out prompts."""
    from pipelines.jobs.prepare import prepare_run  # imports torch

    sizes = {"batch_size": shape.batch_size, "group_size": shape.group_size, "max_staleness": 2}
    prompts = {"source": "arithmetic", "num_prompts": 1000, "num_held_out": 0}
    lengths = {"max_new_tokens": shape.num_tokens, "max_model_len": shape.num_tokens + 64}
    settings = {
        "model": "tiny",
        "num_steps": shape.num_steps,
        "controller": sizes,
        "prompts": prompts,
        "generation": lengths,
        "algorithm": {"num_minibatches": 1},  # a batch of a small log has one group
    }
    recipe = build_recipe(settings, source="")
    layout = RunLayout(root)
    create_run(layout, recipe)
    layout.config.write_text(dump_recipe(recipe))
    prepare_run(layout, recipe)
    return layout


async def write_log(layout: RunLayout, shape: LogShape) -> WrittenLog:
    """Fill an empty run: batches as the reward workers and the driver write and commit them."""
    with hold_run(layout) as writer:
        return await _LogWriter(layout, writer, shape).write()


class _LogWriter:
    def __init__(self, layout: RunLayout, writer: Writer, shape: LogShape) -> None:
        self.layout, self.writer, self.shape = layout, writer, shape
        recipe = load_recipe(layout.config)
        verifier = read_inputs(layout).verifier
        self.seed = recipe.seed
        self.prompts = PromptTable(layout.train_prompts, seed=recipe.seed)
        self.provenance = Provenance(
            writer.writer_epoch, recipe.digest(), CODE_VERSION, verifier=verifier
        )
        self.log = RunLog(layout, writer)
        self.written = WrittenLog()
        self.rng = np.random.default_rng(0)

    async def write(self) -> WrittenLog:
        environment, hashes = self._checkpoint_0()
        provenance = self.provenance
        await self.log.append(
            genesis_row(hashes, provenance=provenance, numeric_environment=environment)
        )
        waiting = await self._commit_batch(1)
        for step in range(1, self.shape.num_steps + 1):
            trained, waiting = waiting, await self._commit_batch(step + 1)
            row = self._ledger_row(step, hashes, trained, waiting, environment)
            hashes = PolicyHashes(row["weights_hash"], row["served_hash"])
            began = perf_counter()
            await self.log.append(row)
            self.written.append_s.append(perf_counter() - began)
            if step % CHECKPOINT_EVERY_STEPS == 0:
                await asyncio.to_thread(self.log.settle, step)
        await self.log.close()
        return self.written

    def _checkpoint_0(self) -> tuple[str, PolicyHashes]:
        from areal_flow.policy.models.policy import empty_policy
        from areal_flow.policy.weights.channel import HashingWriter
        from areal_flow.training.rank import TrainerRank

        recipe = load_recipe(self.layout.config).for_trainer()
        rank = TrainerRank(self.layout, recipe, channel=HashingWriter(), read_rows=lambda _: [])
        rank.adopt(empty_policy(self.layout.model))
        hashes, environment = rank.stage_initial_policy()
        self.layout.checkpoints.mkdir(exist_ok=True)
        rank.snapshot(weights_hash=hashes.weights_hash, next_submission_index=0)
        rank.write_snapshot(0, self.writer)
        rank.complete_snapshot(0, self.writer)
        return environment, hashes

    async def _commit_batch(self, step: int) -> pa.Table:
        """Commit the batch of a step; return the columns that its ledger row needs."""
        shape, parts = self.shape, []
        rows_at_once = max(1, shape.max_rows_per_commit // shape.group_size) * shape.group_size
        first = (step - 1) * shape.batch_size
        for begin in range(0, shape.batch_size, rows_at_once):
            num_rows = min(rows_at_once, shape.batch_size - begin)
            table = self._rows(first + begin, num_rows, version=max(0, step - 2))
            validate_groups(table)
            fragments = write_groups(self.layout.trajectories, table)
            groups = list(self._receipts(table, fragments))
            began = perf_counter()
            await self.log.commit(groups)
            self.written.commit_s.append(perf_counter() - began)
            self.written.num_rows += num_rows
            self.written.payload_bytes += table.nbytes
            parts.append(table.select(["trajectory_id", "reward"]))
        return pa.concat_tables(parts)

    def _receipts(self, table: pa.Table, fragments: tuple[str, ...]) -> Iterator[GroupReceipt]:
        size = self.shape.group_size
        trajectories = receipts(table)
        indices = table["submission_index"].to_pylist()
        for begin in range(0, len(table), size):
            yield GroupReceipt(indices[begin], fragments, trajectories[begin : begin + size])

    def _rows(self, first: int, num_rows: int, *, version: int) -> pa.Table:
        size, length = self.shape.group_size, self.shape.num_tokens
        places = np.arange(first, first + num_rows)
        indices, members = places // size, places % size
        of_group = pa.array((places - first) // size)
        prompts = self.prompts.rows_at(range(int(indices[0]), int(indices[-1]) + 1)).take(of_group)
        pairs = list(zip(indices.tolist(), members.tolist(), strict=True))
        rewards = self.rng.integers(0, 2, num_rows)
        offsets = np.arange(0, num_rows * length + 1, length, dtype=np.int32)
        num_tokens = num_rows * length
        spans = pa.StructArray.from_arrays(
            [np.full(num_rows, version, np.int32), np.full(num_rows, length, np.int32)],
            ["version", "length"],
        )
        columns: dict[str, Any] = {
            "trajectory_id": [trajectory_id(index, member, 0) for index, member in pairs],
            "group_id": [group_id(index) for index in indices.tolist()],
            "submission_index": indices,
            "member": members,
            "branch": 0,
            "attempt": 0,
            "seed": [member_seed(self.seed, index, member) for index, member in pairs],
            "writer_epoch": self.writer.writer_epoch,
            **{n: prompts[n] for n in ("prompt_id", "source", "difficulty", "prompt_tokens")},
            "output_tokens": _ragged(offsets, self.rng.integers(0, 100, num_tokens, np.int32)),
            "behavior_logprobs": _ragged(offsets, -self.rng.random(num_tokens, np.float32)),
            "loss_mask": _ragged(offsets, np.ones(num_tokens, np.bool_)),
            "version_spans": _ragged(np.arange(num_rows + 1, dtype=np.int32), spans),
            "finish_reason": "stop",
            "reward": rewards.astype(np.float64),
            "reward_detail": [_DETAILS[reward] for reward in rewards.tolist()],
            "reward_parts": [[]] * num_rows,
            "tool_calls": [[]] * num_rows,
            "verifier": self.provenance.verifier,
            "generator": "generator-0",
            **dict.fromkeys(("submitted_at", "started_at", "finished_at", "scored_at"), AT),
            "schema_version": SCHEMA_VERSION,
        }
        fields = [TRAJECTORIES.field(name) for name in columns]
        arrays = [_column(columns[each.name], each.type, num_rows) for each in fields]
        table = pa.table(arrays, pa.schema(fields))
        hashes = pa.array(content_hashes(table), pa.string())
        return (
            table.append_column("content_hash", hashes)
            .select(TRAJECTORIES.names)
            .cast(TRAJECTORIES)
        )

    def _ledger_row(
        self,
        step: int,
        parent: PolicyHashes,
        trained: pa.Table,
        waiting: pa.Table,
        environment: str,
    ) -> dict[str, Any]:
        identifiers = tuple(trained["trajectory_id"].to_pylist())
        num_tokens, length = len(trained) * self.shape.num_tokens, self.shape.num_tokens
        staleness = 1 if step > 1 else 0
        metrics = StepMetrics(
            loss=1 / step,
            grad_norm=1.0,
            learning_rate=1e-4,
            reward_mean=pc.mean(trained["reward"]).as_py(),
            completion_tokens_mean=length,
            num_trained_tokens=num_tokens,
            num_masked_tokens=0,
            staleness_mean=staleness,
            staleness_max=staleness,
            masked_fraction_by_decile=(0.0,) * 10,
            read_s=0.1,
            train_s=0.5,
            stage_s=0.1,
            importance_weight_means=(1.0,) * len(trained),
            importance_weight_maxima=(1.0,) * len(trained),
        )
        digest = batch_digest(step - 1, identifiers)
        request = StepRequest(step, parent.weights_hash, step - 1, identifiers, digest, 2)
        hashes = PolicyHashes(f"weights of {step}", f"served of {step}")
        first = 2 * len(trained) if step == 1 else len(trained)
        return step_row(
            request,
            StepResult(step, hashes, metrics, environment, parent.weights_hash),
            entries=StepEntries(num_generated_tokens=first * length),
            watermark=self.log.watermark,
            next_submission_index=(step + 1) * self.shape.batch_size // self.shape.group_size,
            num_waiting_tokens=len(waiting) * length,
            provenance=self.provenance,
            wait_s=0.1,
            step_s=1.0,
            num_generators=1,
        )


def _ragged(offsets: np.ndarray, values: Any) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _column(value: Any, arrow_type: pa.DataType, num_rows: int) -> Any:
    """Return values as a column; a single value is repeated."""
    if isinstance(value, list | np.ndarray):
        return pa.array(value, arrow_type)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value.cast(arrow_type)
    return pa.repeat(pa.scalar(value, arrow_type), num_rows)
