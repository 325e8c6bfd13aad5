"""Generators, trainer GPUs and a log in virtual time: what a flow needs, at costs that are stated.

A generator decodes all its rows together, a token each a decode step, whose time grows with their
number. Nothing happens between two events (a row ends, a row begins, new weights come), so 512
generators are one process. A group goes to the generator with the fewest; new weights interrupt.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import NamedTuple

from areal_flow.algorithms.staleness import count_staleness
from areal_flow.cluster.placement import groups_in_flight
from areal_flow.config import Recipe
from areal_flow.step_metrics import NOTHING_TRAINED
from areal_flow.types import (
    Episode,
    GroupReceipt,
    PolicyHashes,
    ServedWeights,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
)
from tests.flow_fakes import FakeRolledOut

Spans = tuple[VersionSpan, ...]


@dataclass(frozen=True)
class Costs:
    """What one GPU takes. The defaults are assumed, for a policy of 1.5B parameters."""

    decode_step_s: float = 5e-3
    """Of a decode step, whatever it decodes."""
    row_s: float = 8e-5
    """Of each of its rows beside that."""
    prefill_tokens_per_s: float = 100_000.0
    """Of prefixes, which new weights have computed again."""
    train_tokens_per_s: float = 25_000.0
    """Of a trainer's GPU, all its passes together."""

    def decode_tokens_per_s(self, num_rows: int) -> float:
        return num_rows / (self.decode_step_s + num_rows * self.row_s)


class Row(NamedTuple):
    """A sequence that decodes; rows are ordered by their ends, counted in decode steps."""

    end: float
    number: int
    begin: float
    ended: asyncio.Future[Spans]


class Generator:
    """Decodes rows; `_at` is up to when, in the future while prefixes are computed again."""

    def __init__(self, costs: Costs, max_rows: int) -> None:
        self.num_groups = 0
        self._costs = costs
        self._max_rows = max_rows
        self._rows: list[Row] = []
        self._waiting: deque[tuple[int, asyncio.Future[Spans]]] = deque()
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._steps = 0.0
        self._loads = [(0.0, 0)]
        """Each version, and the decode step that was its first."""
        self._timer: asyncio.TimerHandle | None = None

    def complete(self, num_tokens: int) -> asyncio.Future[Spans]:
        """Return what will be the version spans of a completion of so many tokens."""
        ended: asyncio.Future[Spans] = self._loop.create_future()
        self._waiting.append((num_tokens, ended))
        self._go_on()
        return ended

    def load(self, version: int) -> None:
        """Decode with new weights from here on, once all prefixes are computed again."""
        self._advance()
        self._loads.append((self._steps, version))
        num_cached = sum(self._steps - row.begin for row in self._rows)
        self._at += num_cached / self._costs.prefill_tokens_per_s
        self._go_on()

    def _go_on(self) -> None:
        self._advance()
        while self._rows and self._rows[0].end <= self._steps + 1e-6:
            row = heappop(self._rows)
            row.ended.set_result(self._spans(row))
        while self._waiting and len(self._rows) < self._max_rows:
            num_tokens, ended = self._waiting.popleft()
            row = Row(self._steps + num_tokens, next(self._numbers), self._steps, ended)
            heappush(self._rows, row)
        if self._timer:
            self._timer.cancel()
        if self._rows:
            at = self._at + (self._rows[0].end - self._steps) * self._step_s
            self._timer = self._loop.call_at(at, self._go_on)

    def _advance(self) -> None:
        elapsed_s = self._loop.time() - self._at
        if elapsed_s > 0:
            self._steps += elapsed_s / self._step_s if self._rows else 0.0
            self._at += elapsed_s

    @property
    def _step_s(self) -> float:
        return self._costs.decode_step_s + len(self._rows) * self._costs.row_s

    def _spans(self, row: Row) -> Spans:
        first = bisect_right(self._loads, (row.begin, 1 << 62)) - 1
        starts = [row.begin, *(at for at, _ in self._loads[first + 1 :]), row.end]
        bounds = [round(min(at, row.end) - row.begin) for at in starts]
        versions = [version for _, version in self._loads[first:]]
        lengths = (end - begin for begin, end in pairwise(bounds))
        spans = zip(versions, lengths, strict=True)
        return tuple(VersionSpan(version, length) for version, length in spans if length)


class VirtualCluster:
    """A flow's `Rollouts`, `Trainer`, `WeightsPublisher` and `Logs`."""

    def __init__(
        self, recipe: Recipe, costs: Costs, num_tokens: Callable[[int], int], *, num_trainers: int
    ) -> None:
        """Take how long the completion of a seed is, and how many GPUs train."""
        self._costs = costs
        self._num_tokens = num_tokens
        self._num_trainers = num_trainers
        num_generators, rows = recipe.cluster.num_generators, recipe.generation.max_num_seqs
        self._generators = [Generator(costs, rows) for _ in range(num_generators)]
        self._slots = asyncio.Semaphore(groups_in_flight(recipe) * num_generators)
        self._spans: dict[str, Spans] = {}
        self._num_committed = 0
        self.lock = asyncio.Lock()

    async def roll_out(self, episode: Episode) -> FakeRolledOut:
        async with self._slots:
            generator = min(self._generators, key=lambda generator: generator.num_groups)
            generator.num_groups += 1
            completions = [generator.complete(self._num_tokens(seed)) for seed in episode.seeds]
            members = await asyncio.gather(*completions)
            generator.num_groups -= 1
        index = episode.submission_index
        receipts = tuple(
            TrajectoryReceipt(trajectory_id(index, member), spans, float(member % 2), "stop")
            for member, spans in enumerate(members)
        )
        self._spans |= {receipt.trajectory_id: receipt.version_spans for receipt in receipts}
        return FakeRolledOut(GroupReceipt(index, (), receipts))

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        self._num_committed += sum(len(receipt.trajectories) for receipt in receipts)
        return self._num_committed

    async def append(self, row: dict[str, object]) -> None: ...

    async def step(self, request: StepRequest) -> StepResult:
        """Compute every token, masked ones too."""
        spans = [self._spans.pop(identifier) for identifier in request.trajectory_ids]
        counted = count_staleness(
            spans, policy_version=request.policy_version, max_staleness=request.max_staleness
        )
        num_computed = counted.num_trained + counted.num_masked
        seconds = num_computed / self._costs.train_tokens_per_s / self._num_trainers
        await asyncio.sleep(seconds)
        metrics = replace(
            NOTHING_TRAINED,
            num_trained_tokens=counted.num_trained,
            num_masked_tokens=counted.num_masked,
            staleness_mean=counted.staleness_mean,
            seconds_train=seconds,
        )
        hashes = PolicyHashes(f"w{request.step}", f"s{request.step}")
        return StepResult(request.step, hashes, metrics, "{}")

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None: ...

    async def publish(self, version: int) -> None: ...

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        for generator in self._generators:
            generator.load(version)
        return [ServedWeights(version, served_hash, 0.0, 0.0)] * len(self._generators)
