"""Tokens from an engine to tensors: how many a second, in how much memory. Real parts, fake engine.

A batch goes the way of a run's: completions become drafts and an Arrow table in a generator's
process; they are scored, hashed, validated and written in a reward worker's; this process commits
them; a trainer's process reads them, masks what is too old and lays out micro-batches. The engine
draws random arrays, the verifier gives a number, the policy computes nothing, and processes are
joined by pipes. Seconds are those of the parts, one after the other, the engine's own left out.
Memory is what the processes hold at their peaks beyond what they held after a small batch: a group
in generator and reward worker, the whole batch in the trainer.

    python benchmarks/token_path.py [--trajectories 8192] [--tokens 32768] [--group-size 64]
                                    [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT
from areal_flow.config import TrainerSettings
from areal_flow.controller.ledger_row import group_seeds
from areal_flow.run.lease import Writer
from areal_flow.store.codec import receipts, rollout_table, scored_table
from areal_flow.store.trajectories import (
    TrainingRows,
    TrajectoryCommitter,
    create_trajectories,
    validate_groups,
    write_groups,
)
from areal_flow.trainer.backend import Minibatch, StepSettings, UpdateNumbers
from areal_flow.trainer.sequences import MicroBatch, sequences_from_rows
from areal_flow.trainer.step import train_step
from areal_flow.types import (
    Completion,
    EngineStats,
    Episode,
    GroupReceipt,
    GroupRequest,
    Prompt,
    Sampling,
    Score,
    VersionSpan,
    as_tokens,
)
from areal_flow.workflows.group import run_group
from areal_flow.workflows.single_turn import SingleTurn

PROMPT = Prompt("p", "1 + 1 =", "2", 1, as_tokens(range(1, 65)))
POLICY_VERSION, MAX_STALENESS = 6, 4
SPANS = {1: 0.1, 3: 0.3, 6: 0.6}
"""Share of a completion that each version sampled; the first is too old."""
SMALL = 4
"""Trajectories of the batch whose memory is not counted."""
NOBODY = Path("nobody")

Seconds = dict[str, float]


class Stopwatch(Counter[str]):
    """Seconds by part."""

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self[part] += perf_counter() - began  # type: ignore[assignment]


class Memory:
    """What this process holds beyond what it held when this was made."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here

    def peak_bytes(self) -> int:
        (line,) = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        ]
        return 1024 * int(line.split()[1]) - self._before


class FakeServices:
    """What an episode sees: an engine that draws arrays at once."""

    max_model_len = 1 << 20

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.sampling = Sampling(num_tokens)
        self._random = np.random.default_rng(seed)
        self.engine_s = 0.0

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        began = perf_counter()
        completions = [self._draw(request.sampling.max_new_tokens) for _ in request.seeds]
        self.engine_s += perf_counter() - began
        return completions

    def _draw(self, num_tokens: int) -> Completion:
        lengths = [int(share * num_tokens) for share in SPANS.values()]
        lengths[-1] += num_tokens - sum(lengths)
        return Completion(
            self._random.integers(0, 50_000, num_tokens, dtype=np.int32),
            -self._random.random(num_tokens, dtype=np.float32),
            tuple(map(VersionSpan, SPANS, lengths)),
            "length",
        )


def roll_out(index: int, group_size: int, num_tokens: int) -> tuple[pa.Buffer, Seconds, int]:
    """Return a group's table as bytes, the seconds that it took, and bytes of memory."""
    watch, memory = Stopwatch(), Memory()
    services: Any = FakeServices(num_tokens, index)
    seeds = group_seeds(0, index, group_size)
    episode = Episode(index, PROMPT, seeds, 0, 1, datetime.now(UTC))
    # `asyncio.run` would write the group out as a text, for the name of its signal handler.
    with closing(asyncio.new_event_loop()) as loop, watch.time("completions to drafts"):
        group = loop.run_until_complete(run_group(SingleTurn(), episode, services))
    watch["completions to drafts"] -= services.engine_s  # type: ignore[assignment]
    with watch.time("drafts to table"):
        table = rollout_table(
            [(episode, group)],
            generator="generator-0",
            started_at=datetime.now(UTC),
            engine_stats=EngineStats(),
        )
    del group
    with watch.time("table to reward worker"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return sink.getvalue(), dict(watch), memory.peak_bytes()


def score_and_write(path: Path, sent: pa.Buffer) -> tuple[GroupReceipt, Seconds, int]:
    """Write a group; return its receipt, the seconds that it took, and bytes of memory."""
    watch, memory = Stopwatch(), Memory()
    with watch.time("table to reward worker"), pa.ipc.open_stream(sent) as stream:
        table = stream.read_all()
    with watch.time("scores and hashes"):
        scores = [Score(float(member % 2), "right") for member in range(len(table))]
        scored = scored_table(table, scores, verifier="fake@0")
    with watch.time("validation"):
        validate_groups(scored)
    with watch.time("fragment"):
        fragments = write_groups(path, scored)
    index = scored["submission_index"][0].as_py()
    receipt = GroupReceipt(index, fragments, receipts(scored))
    return receipt, dict(watch), len(sent) + memory.peak_bytes()


class CountingBackend:
    """A `TrainerBackend` that computes nothing; it takes every micro-batch as the real one does."""

    def __init__(self, num_tokens: int) -> None:
        self.settings = TrainerSettings(tokens_per_micro_batch=num_tokens)
        self.num_tokens = self.num_trained = 0

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Any:
        return [torch.zeros(micro.targets_M.numel()) for micro in micro_batches]

    def update(self, minibatch: Minibatch, *_: Any) -> UpdateNumbers:
        for micro in minibatch.micro_batches[0]:
            self.num_tokens += micro.input_ids_1T.numel()
            self.num_trained += micro.targets_M.numel()
        return UpdateNumbers([0.0], [0.0])


def train(path: Path, trajectory_ids: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Read a batch and lay it out; return counts, seconds, and bytes at the peak."""
    watch, memory = Stopwatch(), Memory()
    with watch.time("rows, with their hashes"):
        rows = TrainingRows(path, NOBODY)(trajectory_ids)
    with watch.time("staleness masks"):
        bound = {"policy_version": POLICY_VERSION, "max_staleness": MAX_STALENESS}
        sequences = sequences_from_rows(rows, **bound)
        del rows
    backend: Any = CountingBackend(2 * (num_tokens + len(PROMPT.tokens)))
    settings = StepSettings(DecoupledPPO(num_minibatches=4), 1.0, 0)
    with watch.time("micro-batches"):
        train_step(backend, sequences, step=1, settings=settings)
    return {
        "seconds": dict(watch),
        "peak_bytes": memory.peak_bytes(),
        "num_tokens": backend.num_tokens,
        "num_trained_tokens": backend.num_trained,
    }


def measure(root: Path, num_groups: int, group_size: int, num_tokens: int) -> dict[str, Any]:
    """Take so many groups from the engine to tensors, after a small batch that is not counted."""
    os.environ |= PROCESS_ENVIRONMENT  # that of a run's workers
    with ExitStack() as stack:
        spawn = get_context("spawn")
        generator, reward_worker, trainer = (
            stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for _ in range(3)
        )

        def take(path: Path, num_groups: int, group_size: int, num_tokens: int) -> dict[str, Any]:
            create_trajectories(path)
            committer = TrajectoryCommitter(path, Writer(NOBODY, 1))
            seconds, peaks, ids = Stopwatch(), Counter[str](), list[str]()
            for index in range(num_groups):
                sent, rolled_out, of_generator = generator.submit(
                    roll_out, index, group_size, num_tokens
                ).result()
                receipt, written, of_reward_worker = reward_worker.submit(
                    score_and_write, path, sent
                ).result()
                with seconds.time("commit"):
                    committer.commit([receipt])
                seconds.update(rolled_out)
                seconds.update(written)
                peaks |= Counter({"generator": of_generator, "reward worker": of_reward_worker})
                ids += [trajectory.trajectory_id for trajectory in receipt.trajectories]
            payload_bytes = num_groups * len(sent)
            found = trainer.submit(train, path, ids, num_tokens).result()
            seconds.update(found.pop("seconds"))
            peaks["trainer"] = found.pop("peak_bytes")
            return {
                **found,
                "payload_bytes": payload_bytes,
                "peak_bytes": peaks,
                "seconds": seconds,
                "tokens_per_s": found["num_tokens"] / sum(seconds.values()),
                "memory_over_payload": sum(peaks.values()) / payload_bytes,
            }

        take(root / "small" / "trajectories.lance", 1, SMALL, num_tokens)
        return take(root / "trajectories.lance", num_groups, group_size, num_tokens)


def print_report(report: dict[str, Any]) -> None:
    table = Table("", "seconds", "ns a token", box=None)
    for part, seconds in report["seconds"].items():
        table.add_row(part, f"{seconds:.2f}", f"{1e9 * seconds / report['num_tokens']:.1f}")
    Console(width=100).print(table)
    print(
        f"{report['num_tokens']:,} tokens, {report['num_trained_tokens']:,} of them trained, "
        f"{report['payload_bytes'] / 1e6:,.0f} MB: {report['tokens_per_s'] / 1e6:.2f} million "
        "tokens a second"
    )
    peaks = ", ".join(f"{of} {peak / 1e6:,.0f} MB" for of, peak in report["peak_bytes"].items())
    print(f"memory over payload: {report['memory_over_payload']:.2f} ({peaks})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_groups = arguments.trajectories // arguments.group_size
    with tempfile.TemporaryDirectory(prefix="areal-flow-token-path-") as scratch:
        report = measure(Path(scratch), num_groups, arguments.group_size, arguments.tokens)
    print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
