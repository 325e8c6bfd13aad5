"""Simulate a run in virtual time: the real controller and schedules, over the cost model.

Not simulated: transfers of trajectories and the log. Scoring takes a fixed time per completion.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from areal_flow.algorithms.staleness import count_staleness
from areal_flow.config import Recipe
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
    as_tokens,
    trajectory_id,
)
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import (
    FlowBackends,
    InitialState,
    RetryBudget,
    groups_in_flight,
    max_running_trajectories,
)
from areal_flow.flow.schedules import schedule_of
from areal_flow.log.ledger_row import Provenance
from areal_flow.planning.costs import Costs, Lengths
from areal_flow.planning.virtual_time import Spans, VirtualGenerator, run_in_virtual_time

PROMPT = Prompt("prompt", "a question", "its answer", 1, as_tokens([1]))


@dataclass(frozen=True)
class FaultModel:
    """What may go wrong; by default nothing does."""

    speeds: Sequence[float] = (1.0,)
    """Relative speeds of generators, cycled."""
    failures_per_hour: float = 0.0
    """Per generator."""
    restart_s: float = 120.0
    slow_load_s: Callable[[int], float] = lambda generator: 0.0
    """Extra time of a generator to read new weights."""
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """Means over the measured steps."""

    step_s: float
    train_s: float
    generators_busy: float
    """Share of their time."""
    staleness: dict[int, float] = field(repr=False)
    """Shares of trained tokens by staleness, in versions."""
    ages: dict[int, float] = field(repr=False)
    """Shares of all tokens in the batches, masked ones included, by age in versions."""
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    masked_fraction: float
    num_failures: int = 0

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())

    @property
    def trainer_busy(self) -> float:
        return self.train_s / self.step_s


class VirtualCluster:
    """A flow's `Rollouts`, `Trainer`, `WeightsPublisher` and `Logs`."""

    def __init__(
        self, recipe: Recipe, costs: Costs, lengths: Lengths, faults: FaultModel = FaultModel()
    ) -> None:
        self._costs, self._lengths, self._faults = costs, lengths, faults
        self._shares_gpu = recipe.cluster.has_one_gpu
        self._random = random.Random(faults.seed)
        speeds = faults.speeds
        self.generators = [
            VirtualGenerator(
                costs,
                prompt_tokens=lengths.prompt_tokens,
                interruption=recipe.generation.interruption,
                speed=speeds[number % len(speeds)],
            )
            for number in range(recipe.cluster.num_generators)
        ]
        self._slots = asyncio.Semaphore(groups_in_flight(recipe) * len(self.generators))
        self._spans: dict[str, Spans] = {}
        self._num_committed = 0
        self._scored_at = 0.0
        self.staleness: list[Counter[int]] = []
        self.ages: list[Counter[int]] = []
        self.num_failures = 0
        self.lock = asyncio.Lock()

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> GroupReceipt:
        async with self._slots:
            members: list[Spans] = []
            while not members:  # a group that its generator lost runs again on another one
                generator = min(self.generators, key=lambda generator: generator.num_groups)
                generator.num_groups += 1
                with suppress(EngineError):
                    members = await generator.complete(self._lengths.of_group(episode.seeds))
                generator.num_groups -= 1
        await self._score(len(members))
        index = episode.submission_index
        receipts = tuple(
            TrajectoryReceipt(trajectory_id(index, member), spans, float(member % 2), "stop")
            for member, spans in enumerate(members)
        )
        self._spans |= {receipt.trajectory_id: receipt.version_spans for receipt in receipts}
        return GroupReceipt(index, (), receipts)

    async def write(self, rows: GroupReceipt, budget: RetryBudget) -> GroupReceipt:
        return rows

    async def _score(self, number: int) -> None:
        """Wait until the reward workers have scored everything in their queue."""
        now = asyncio.get_running_loop().time()
        self._scored_at = max(self._scored_at, now) + number * self._costs.reward_s
        await asyncio.sleep(self._scored_at - now + self._costs.commit_s)

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        self._num_committed += sum(len(receipt.trajectories) for receipt in receipts)
        return self._num_committed

    async def append(self, row: dict[str, object]) -> None: ...

    async def step(self, request: StepRequest) -> StepResult:
        """Take the time to compute every token, masked ones included."""
        spans = [self._spans.pop(identifier) for identifier in request.trajectory_ids]
        counted = count_staleness(
            spans, policy_version=request.policy_version, max_staleness=request.max_staleness
        )
        prompt = self._lengths.prompt_tokens
        seconds = self._costs.train_s(
            [prompt + sum(span.length for span in each) for each in spans]
        )
        sharing = [each for each in self.generators if self._shares_gpu and each.num_groups]
        for generator in sharing:
            seconds *= 2  # both have half of the GPU
            generator.change_speed(0.5)
        await asyncio.sleep(seconds)
        for generator in sharing:
            generator.change_speed(2.0)
        self.staleness.append(Counter(counted.num_trained_by_staleness))
        ages = Counter[int]()
        for version, length in (span for each in spans for span in each):
            ages[request.policy_version - version] += length
        self.ages.append(ages)
        metrics = replace(
            NOTHING_TRAINED,
            num_trained_tokens=counted.num_trained,
            num_masked_tokens=counted.num_masked,
            staleness_mean=counted.staleness_mean,
            train_s=seconds,
        )
        hashes = PolicyHashes(f"w{request.step}", f"s{request.step}")
        return StepResult(request.step, hashes, metrics, "{}", request.parent_hash)

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None: ...

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self._costs.publish_s)

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        waits = [self._load(number, version) for number in range(len(self.generators))]
        await asyncio.gather(*waits)
        return [ServedWeights(version, served_hash, self._costs.load_s, 0.0)] * len(waits)

    async def _load(self, number: int, version: int) -> None:
        await asyncio.sleep(self._costs.load_s + self._faults.slow_load_s(number))
        if version > self.generators[number].version:
            await self.generators[number].load(version)

    async def inject_failures(self) -> None:
        rate = self._faults.failures_per_hour * len(self.generators) / 3600
        while rate:
            await asyncio.sleep(self._random.expovariate(rate))
            self._random.choice(self.generators).fail(restart_s=self._faults.restart_s)
            self.num_failures += 1
        await asyncio.Event().wait()


def simulate(
    recipe: Recipe,
    costs: Costs,
    lengths: Lengths,
    *,
    num_skipped: int,
    faults: FaultModel = FaultModel(),
) -> Simulated:
    """Run a recipe in virtual time; measure all but the first `num_skipped` steps."""
    simulated: Simulated = run_in_virtual_time(
        _simulate(recipe, costs, lengths, faults, num_skipped)
    )
    return simulated


async def _simulate(
    recipe: Recipe, costs: Costs, lengths: Lengths, faults: FaultModel, num_skipped: int
) -> Simulated:
    cluster, loop = VirtualCluster(recipe, costs, lengths, faults), asyncio.get_running_loop()
    rows: deque[dict[str, Any]] = deque()

    async def on_step(row: dict[str, Any]) -> None:
        totals = {
            "at": loop.time(),
            "busy": sum(each.busy_s for each in cluster.generators),
            "tokens": sum(each.num_tokens for each in cluster.generators),
        }
        rows.append(row | totals)

    flow = Flow(
        recipe,
        FlowBackends(cluster, cluster, cluster, cluster, lambda index: PROMPT, on_step),
        InitialState(),
        Provenance(1, recipe.digest(), "code"),
        max_running=max_running_trajectories(recipe, num_generators=len(cluster.generators)),
    )
    failing = asyncio.create_task(cluster.inject_failures())
    try:
        await schedule_of(recipe)(flow)
    finally:
        failing.cancel()
        await flow.close()
    return _measured(list(rows), cluster, num_skipped)


def _measured(rows: list[dict[str, Any]], cluster: VirtualCluster, num_skipped: int) -> Simulated:
    first, last, measured = rows[num_skipped - 1], rows[-1], rows[num_skipped:]
    seconds = last["at"] - first["at"]
    trained, masked = (
        sum(row[f"num_{kind}_tokens"] for row in measured) for kind in ("trained", "masked")
    )
    return Simulated(
        step_s=seconds / len(measured),
        train_s=sum(row["train_s"] for row in measured) / len(measured),
        generators_busy=(last["busy"] - first["busy"]) / seconds / len(cluster.generators),
        staleness=_shares(cluster.staleness[num_skipped:]),
        ages=_shares(cluster.ages[num_skipped:]),
        generated_tokens_per_s=(last["tokens"] - first["tokens"]) / seconds,
        trained_tokens_per_s=trained / seconds,
        masked_fraction=masked / (trained + masked),
        num_failures=cluster.num_failures,
    )


def _shares(counts: Sequence[Counter[int]]) -> dict[int, float]:
    total = sum(counts, Counter[int]())
    return {key: total[key] / total.total() for key in sorted(total)}
