"""Fakes that ship: second implementations of the protocols, for tests and for trying ideas.

They keep the promises of the protocols they stand for; the contract suites hold them to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path
from typing import Any

from areal_flow.algorithms.staleness import count_staleness
from areal_flow.errors import EngineError, WeightsError
from areal_flow.types import (
    NOTHING_TRAINED,
    Completion,
    Episode,
    GroupReceipt,
    GroupRequest,
    LogHead,
    PolicyHashes,
    Prompt,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
    version_spans_of,
)


class FakePrompts:
    """`num_prompts` prompts, in order, over and over."""

    def __init__(self, num_prompts: int = 7) -> None:
        self.num_prompts = num_prompts

    def prompt_at(self, submission_index: int) -> Prompt:
        index = submission_index % self.num_prompts
        return Prompt(f"prompt-{index}", f"{index} + 1 =", str(index + 1), 1, (1, 2, 3))


@dataclass
class FakeCluster:
    """Generators and a trainer in (virtual) time: durations, deaths and slow loads as told.

    Tokens of an episode carry the version that its generator served when they were sampled; each
    generator loads new weights in its own time, and is acknowledged with the last.
    """

    randomness: random.Random
    duration_s: Callable[[random.Random], float] = lambda r: r.expovariate(1.0)
    train_s: float = 1.0
    load_s: Callable[[random.Random], float] = lambda r: 0.0
    death_rate: float = 0.0
    unscored_rate: float = 0.0
    num_tokens: int = 8
    num_generators: int = 3
    initial_version: int = 0
    num_running: int = 0
    training: bool = False
    on_event: Callable[[], None] = lambda: None
    requests: list[StepRequest] = field(default_factory=list)
    spans: dict[str, tuple[VersionSpan, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.served = [self.initial_version] * self.num_generators

    async def run(self, episode: Episode) -> GroupReceipt:
        """`Rollouts.run`."""
        self.num_running += 1
        try:
            return await self._roll_out(episode)
        finally:
            self.num_running -= 1

    async def _roll_out(self, episode: Episode) -> GroupReceipt:
        generator = self.randomness.randrange(self.num_generators)
        pause_s = self.duration_s(self.randomness) / self.num_tokens
        versions = []
        for _ in range(self.num_tokens):
            await asyncio.sleep(pause_s)
            versions.append(self.served[generator])
            if self.randomness.random() < self.death_rate / self.num_tokens:
                raise EngineError("the fake generator died")
        members = [
            TrajectoryReceipt(
                trajectory_id(episode.submission_index, member),
                version_spans_of(versions),
                None if self.randomness.random() < self.unscored_rate else float(member % 2),
                "stop",
            )
            for member in range(len(episode.seeds))
        ]
        self.spans |= {member.trajectory_id: member.version_spans for member in members}
        return GroupReceipt(
            episode.submission_index,
            (f"fragment-{episode.submission_index}",),
            tuple(members),
            member_errors=tuple("unscored" for member in members if member.reward is None),
        )

    async def step(self, request: StepRequest) -> StepResult:
        """`Trainer.step`: takes its time, counts what it would train."""
        self.on_event()
        self.training = True
        await asyncio.sleep(self.train_s)
        self.training = False
        self.requests.append(request)
        spans = [self.spans[identifier] for identifier in request.trajectory_ids]
        count = count_staleness(
            spans, policy_version=request.policy_version, max_staleness=request.max_staleness
        )
        digest = hashlib.sha256(f"{request}".encode()).hexdigest()[:8]
        metrics = replace(
            NOTHING_TRAINED,
            completion_tokens_mean=float(self.num_tokens),
            num_trained_tokens=count.num_trained,
            num_masked_tokens=count.num_masked,
            staleness_mean=count.staleness_mean,
            staleness_max=count.staleness_max,
            seconds_train=self.train_s,
        )
        return StepResult(request.step, PolicyHashes(digest, digest), metrics, "{}")

    async def publish(self, version: int) -> None:
        """`WeightsPublisher.publish`."""
        self.on_event()

    async def load_everywhere(self, version: int) -> None:
        """`WeightsPublisher.load_everywhere`."""
        await asyncio.gather(*(self._load(g, version) for g in range(self.num_generators)))
        self.on_event()

    async def _load(self, generator: int, version: int) -> None:
        await asyncio.sleep(self.load_s(self.randomness))
        self.served[generator] = max(self.served[generator], version)


@dataclass
class MemoryLog:
    """A `TrajectoryLog` and a `StepLedger` in memory, and an `Observer` that remembers.

    Commits are visible `acknowledge_s` before the caller hears of them.
    """

    acknowledge_s: float = 0.01
    committed: list[TrajectoryReceipt] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0

    @property
    def head(self) -> LogHead:
        return LogHead(len(self.committed), self.version)

    async def commit(self, receipts: Sequence[GroupReceipt]) -> LogHead:
        self.version += 1
        known = {trajectory.trajectory_id for trajectory in self.committed}
        for receipt in receipts:
            self.committed += [t for t in receipt.trajectories if t.trajectory_id not in known]
        head = self.head
        await asyncio.sleep(self.acknowledge_s)
        return head

    async def append(self, row: dict[str, Any]) -> None:
        assert all(row["step"] != earlier["step"] for earlier in self.rows)
        self.rows.append(row)

    async def on_step(self, row: dict[str, Any]) -> None: ...


class BigramEngine:
    """An `EngineCore` whose next token depends on the last one and the version: exact and quick.

    Weights are a mapping with one entry, `"logits"`: a square table of next-token logits.
    """

    def __init__(
        self, logits: Sequence[Sequence[float]], *, version: int = 0, max_num_seqs: int = 4
    ) -> None:
        self.version = version
        self._logits = logits
        self._max_num_seqs = max_num_seqs
        self._groups: dict[str, tuple[GroupRequest, dict[int, _Partial]]] = {}

    def add(self, request: GroupRequest) -> None:
        if not request.prompt_tokens:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is running already")
        partials = {index: _Partial() for index in range(len(request.seeds))}
        self._groups[request.request_id] = (request, partials)

    def cancel(self, request_id: str) -> None:
        self._groups.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._groups)

    def step(self) -> list[tuple[str, list[Completion]]]:
        slots = self._max_num_seqs
        for request, partials in self._groups.values():
            for index, partial in partials.items():
                if partial.finish_reason is None and slots:
                    slots -= 1
                    self._extend(request, index, partial)
        complete = [
            request_id
            for request_id, (_, partials) in self._groups.items()
            if all(partial.finish_reason for partial in partials.values())
        ]
        return [
            (request_id, [p.completion() for p in self._groups.pop(request_id)[1].values()])
            for request_id in complete
        ]

    def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        if set(tensors) != {"logits"}:
            raise WeightsError("expected the bigram logits")
        self._logits, self.version = tensors["logits"], version

    def _extend(self, request: GroupRequest, index: int, partial: _Partial) -> None:
        last = partial.tokens[-1] if partial.tokens else request.prompt_tokens[-1]
        logprobs = _log_softmax(self._logits[last], request.sampling.temperature)
        drawn = random.Random(f"{request.seeds[index]}:{len(partial.tokens)}").random()
        token = _invert(logprobs, drawn)
        partial.tokens.append(token)
        partial.logprobs.append(logprobs[token])
        partial.versions.append(self.version)
        if token in request.sampling.stop_token_ids:
            partial.finish_reason = "stop"
        elif len(partial.tokens) == request.sampling.max_new_tokens:
            partial.finish_reason = "length"


@dataclass
class _Partial:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: Any = None

    def completion(self) -> Completion:
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            version_spans_of(self.versions),
            self.finish_reason,
        )


def _log_softmax(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in logits]
    largest = max(scaled)
    total = largest + log(sum(exp(value - largest) for value in scaled))
    return [value - total for value in scaled]


def _invert(logprobs: Sequence[float], drawn: float) -> int:
    cumulative = 0.0
    for token, logprob in enumerate(logprobs):
        cumulative += exp(logprob)
        if drawn < cumulative:
            return token
    return len(logprobs) - 1


class MemoryWriter:
    """A `WeightsWriter` in one process that pushes: its readers have what was published to them."""

    def __init__(self) -> None:
        self._staged: dict[int, dict[str, Any]] = {}
        self._readers: list[MemoryReader] = []
        self._newest: tuple[int, dict[str, Any]] | None = None

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        from areal_flow.models.hashing import hash_tensors

        self._staged[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        return hash_tensors(tensors)

    def publish(self, version: int) -> None:
        if version in self._staged:
            self._newest = version, self._staged.pop(version)
        elif self._newest is None or version != self._newest[0]:
            raise WeightsError(f"version {version} was never staged")
        for reader in self._readers:
            reader.receive(*self._newest)

    def join(self, reader: MemoryReader) -> None:
        """Push what is published from here on, and what is newest now, to a reader."""
        self._readers.append(reader)
        if self._newest:
            reader.receive(*self._newest)


class MemoryReader:
    """The `WeightsReader` at the other end of a `MemoryWriter`."""

    def __init__(self, writer: MemoryWriter) -> None:
        self._received: dict[int, dict[str, Any]] = {}
        writer.join(self)

    def receive(self, version: int, tensors: dict[str, Any]) -> None:
        self._received[version] = tensors

    def newest(self) -> int:
        if not self._received:
            raise WeightsError("no weights were published")
        return max(self._received)

    def load(self, version: int) -> dict[str, Any]:
        if version not in self._received:
            raise WeightsError(f"version {version} was not published")
        return self._received[version]


class MemoryTracker:
    """A `Tracker` that remembers; while `away`, it raises as one that cannot be reached."""

    def __init__(self) -> None:
        self.away = False
        self.metrics: dict[str, dict[int, float]] = {}
        self.timestamps_ms: dict[int, int] = {}
        self.parameters: dict[str, str] = {}
        self.versions: dict[Path, str] = {}
        self.tags: dict[Path, Mapping[str, str]] = {}
        self.datasets: set[int] = set()
        self.aliases: dict[str, Path] = {}
        self.delivered = 0
        self.status = ""
        self.model_version: str | None = None

    def begin(self) -> int:
        self._answer()
        self.status = "RUNNING"
        return self.delivered

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        self._answer()
        self.parameters = {name: str(value) for name, value in parameters.items()} | self.parameters

    def log_step(self, step: int, metrics: Mapping[str, float], *, timestamp_ms: int) -> None:
        self.log_evaluation(step, metrics, timestamp_ms=timestamp_ms)
        self.timestamps_ms[step], self.delivered = timestamp_ms, step

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        self._answer()
        for name, value in metrics.items():
            self.metrics.setdefault(name, {})[policy_version] = value

    def register_checkpoints(self, present: Sequence[Any]) -> None:
        self._answer()
        for checkpoint in present:
            number = str(len(self.tags) + 1)
            self.versions.setdefault(checkpoint.path, number)
            self.tags.setdefault(checkpoint.path, checkpoint.tags)
            self.datasets.add(checkpoint.dataset_version)
            self.aliases["current"] = checkpoint.path
            self.model_version = self.versions[checkpoint.path]
        kept = {checkpoint.path for checkpoint in present}
        self.versions = {path: n for path, n in self.versions.items() if path in kept}

    def protected(self) -> frozenset[Path]:
        self._answer()
        return frozenset(path for alias, path in self.aliases.items() if alias != "current")

    def is_reachable(self) -> bool:
        return not self.away

    def end(self, status: str) -> None:
        self._answer()
        self.status = status

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("the fake tracker is away")
