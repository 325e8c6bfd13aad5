"""Fakes for tests of a flow: recipe, prompts, a cluster in virtual time, logs in memory."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.algorithms.staleness import count_staleness
from areal_flow.config import Recipe
from areal_flow.config.recipe import ControllerSettings
from areal_flow.core.errors import EngineError
from areal_flow.core.types import (
    NOTHING_TRAINED,
    Episode,
    GroupReceipt,
    PolicyHashes,
    Prompt,
    ServedWeights,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
    VersionSpan,
    as_tokens,
    merged_spans,
    trajectory_id,
)
from areal_flow.flow.flow_setup import RetryBudget


def flow_recipe(*, num_steps: int, seed: int = 0, **controller: int) -> Recipe:
    """Return a recipe with this many steps and these controller settings."""
    return Recipe(
        num_steps=num_steps,
        seed=seed,
        controller=ControllerSettings(**controller),
        algorithm=DecoupledPPO(num_minibatches=1),
    )


def prompt_at(submission_index: int) -> Prompt:
    """Return one of seven prompts, in order, over and over."""
    index = submission_index % 7
    return Prompt(f"prompt-{index}", f"{index} + 1 =", str(index + 1), 1, as_tokens([1, 2, 3]))


@dataclass
class FakeCluster:
    """Generators and a trainer in virtual time, with given durations, deaths and slow loads.

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
    named_ahead: list[tuple[str, ...]] = field(default_factory=list)
    spans: dict[str, tuple[VersionSpan, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = asyncio.Lock()
        self.served = [self.initial_version] * self.num_generators

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> GroupReceipt:
        """`Rollouts.roll_out`."""
        self.num_running += 1
        try:
            return await self._roll_out(episode)
        finally:
            self.num_running -= 1

    async def write(self, rows: GroupReceipt, budget: RetryBudget) -> GroupReceipt:
        """`Rollouts.write`, at once."""
        return rows

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
                merged_spans(VersionSpan(version, 1) for version in versions),
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
            train_s=self.train_s,
        )
        return StepResult(
            request.step, PolicyHashes(digest, digest), metrics, "{}", request.parent_hash
        )

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """`Trainer.read_ahead`."""
        self.named_ahead.append(tuple(trajectory_ids))

    async def publish(self, version: int) -> None:
        """`WeightsPublisher.publish`."""
        self.on_event()

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        """`WeightsPublisher.load_everywhere`."""
        await asyncio.gather(*(self._load(g, version) for g in range(self.num_generators)))
        self.on_event()
        return [ServedWeights(version, served_hash, 0.5, 0.25)] * self.num_generators

    async def _load(self, generator: int, version: int) -> None:
        await asyncio.sleep(self.load_s(self.randomness))
        self.served[generator] = max(self.served[generator], version)


@dataclass
class MemoryLog:
    """The controller's `Logs` in memory, and an `on_step` that shows nothing.

    Commits are visible `acknowledge_s` before the caller hears of them.
    """

    acknowledge_s: float = 0.01
    committed: list[TrajectoryReceipt] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_commits: int = 0

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        self.num_commits += 1
        committed_ids = {trajectory.trajectory_id for trajectory in self.committed}
        for receipt in receipts:
            self.committed += [
                t for t in receipt.trajectories if t.trajectory_id not in committed_ids
            ]
        watermark = len(self.committed)
        await asyncio.sleep(self.acknowledge_s)
        return watermark

    async def append(self, row: dict[str, Any]) -> None:
        assert all(row["step"] != earlier["step"] for earlier in self.rows)
        self.rows.append(row)

    async def on_step(self, row: dict[str, Any]) -> None: ...
