"""Groups are rolled out, then scored and written together; what kills workers fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dask.utils import key_split

from areal_flow.cluster import reward_tasks, rollouts
from areal_flow.cluster.registry import Executions
from areal_flow.cluster.rollouts import DaskRollouts
from areal_flow.cluster.scoring import BATCHING_WINDOW_S, KillsWorkers, Scoring, ScoringBatcher
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.core.errors import EpisodeError, InfrastructureError, RewardError, SchemaError
from areal_flow.core.types import GroupReceipt, Score
from areal_flow.flow.flow_setup import RetryBudget
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.episodes import episode_of

NO_EXECUTIONS = Executions(Path("nowhere"))


def batcher(workers: Any) -> ScoringBatcher:
    return ScoringBatcher(Scoring(workers, workers), workers)


def receipt(ready: ScoringBatcher, table: Any) -> Any:
    return ready.receipt(table, RetryBudget(3))


class FakeRewardWorkers:
    """A client whose tasks take some seconds, a group and a trip, and refuse broken groups."""

    def __init__(
        self,
        num_workers: int,
        *,
        seconds_a_group: float,
        seconds_a_trip: float = 0.0,
        max_concurrency: int = 1,
    ) -> None:
        self.sizes: list[int] = []
        self.registry = self
        self.executions = NO_EXECUTIONS
        self.num_running = self.most_running = 0
        self._num_workers = num_workers
        self._seconds = seconds_a_group
        self._seconds_a_trip = seconds_a_trip
        self._max_concurrency = max_concurrency

    def present(self, role: str) -> Sequence[str]:
        return [role] * self._num_workers

    async def submit(self, function: Any, tables: Any, **options: Any) -> Any:
        self.sizes.append(len(tables))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        seconds = self._seconds * -(-len(tables) // self._max_concurrency)
        await asyncio.sleep(self._seconds_a_trip + seconds)
        self.num_running -= 1
        if "broken" in tables:
            raise RewardError("a verifier cannot be reached")
        results = [SchemaError(table) if table == "invalid" else f"{table}!" for table in tables]
        return results, seconds, self._max_concurrency


def receipts_of(workers: FakeRewardWorkers, *arrivals: Sequence[str]) -> list[Any]:
    """Return the receipts of groups, some ready at once, the others ten seconds later."""

    async def all_receipts() -> list[Any]:
        ready = batcher(workers)
        waiting: list[Any] = []
        for tables in arrivals:
            waiting += [asyncio.ensure_future(receipt(ready, table)) for table in tables]
            await asyncio.sleep(10)
        return await asyncio.gather(*waiting, return_exceptions=True)

    heard: list[Any] = run_in_virtual_time(all_receipts())
    return [str(receipt) for receipt in heard]


def test_groups_that_are_ready_together_share_a_task_and_each_hears_of_its_own() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001)
    assert receipts_of(workers, "abcdef", ["g", "invalid", "i"]) == [
        *("a!", "b!", "c!", "d!", "e!", "f!"),
        *("g!", "invalid", "i!"),
    ]
    assert workers.sizes == [1, 5, 3]


@pytest.mark.parametrize("others_coming", [True, False])
def test_group_waits_for_others_only_while_some_are_on_their_way(
    others_coming: bool,
) -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001)

    async def seconds_until_written() -> float:
        ready = batcher(workers)
        clock = asyncio.get_running_loop().time
        began = clock()
        with ready.counting_rollout() if others_coming else nullcontext():
            await receipt(ready, "a")
        return clock() - began

    waited: float = run_in_virtual_time(seconds_until_written())
    assert waited == pytest.approx(others_coming * BATCHING_WINDOW_S + 0.001)


def test_groups_of_slow_verdicts_are_not_kept_waiting_for_each_other() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.1)
    receipts_of(workers, "abcde")
    assert workers.sizes == [1, 2, 2]
    workers = FakeRewardWorkers(1, seconds_a_group=1.0)
    receipts_of(workers, "abcde")
    assert workers.sizes == [1] * 5


def test_groups_for_a_judge_are_scored_together_up_to_its_max_concurrency() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=3.0, max_concurrency=4)
    receipts_of(workers, "abcdefghijklmnop")
    assert workers.sizes == [1, 4, 4, 4, 3]


def test_slow_cluster_makes_no_task_smaller() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001, seconds_a_trip=1.0)
    receipts_of(workers, "a", "bcdefg")
    assert workers.sizes == [1, 6]


def test_nothing_is_scored_for_episodes_that_were_cancelled() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001)

    async def cancel() -> None:
        ready = batcher(workers)
        with ready.counting_rollout():
            waiting = asyncio.ensure_future(receipt(ready, "a"))
            await asyncio.sleep(BATCHING_WINDOW_S / 2)
            waiting.cancel()
            await asyncio.sleep(10)

    run_in_virtual_time(cancel())
    assert workers.sizes == []


def test_every_reward_worker_gets_its_share() -> None:
    workers = FakeRewardWorkers(3, seconds_a_group=0.001)
    receipts_of(workers, "a", "bcdefghi")
    assert workers.sizes[1:] == [3, 3, 2]
    assert workers.most_running == 3
    assert receipts_of(FakeRewardWorkers(0, seconds_a_group=0.001), "a") == ["a!"]


def test_task_that_fails_costs_only_the_group_that_makes_it_fail() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001)
    heard = receipts_of(workers, "a", ["b", "broken", "c"], "d")
    assert heard == ["a!", "b!", "a verifier cannot be reached", "c!", "d!"]
    assert workers.sizes == [1, 3, 1, 1, 1, 1]


class Poisoned:
    """A client whose reward workers die over these rows, two per task."""

    def __init__(self, *rows: int, num_rows: int = 4) -> None:
        self.registry = self
        self.executions = NO_EXECUTIONS
        self.num_deaths = 0
        self._poisoned, self._num_rows = rows, num_rows

    def present(self, role: str) -> Sequence[str]:
        return [role]

    async def submit(self, function: Any, table: Any, *arguments: Any, **options: Any) -> Any:
        if function is reward_tasks.num_rows:
            return self._num_rows
        if function is reward_tasks.score_row:
            self._die_over(arguments[0])
            return Score(float(arguments[0]))
        known_ids = getattr(function, "keywords", {}).get("known_scores")
        if known_ids is None and "poisoned" in table:
            self._die_over(*range(self._num_rows))
        return [known_ids if known_ids else f"{name}!" for name in table], 0.001, 1

    def _die_over(self, *rows: int) -> None:
        if set(rows) & set(self._poisoned):
            self.num_deaths += 2
            raise KillsWorkers("each worker died")


def scores_of(cluster: Poisoned) -> list[float | None]:
    """Return the rewards of a group over rows of which workers die, between two others."""

    async def heard() -> list[Any]:
        ready = batcher(cluster)
        groups = [receipt(ready, name) for name in ("a", "poisoned", "b")]
        return await asyncio.gather(*groups)

    before, poisoned, after = run_in_virtual_time(heard())
    assert (before, after) == ("a!", "b!")
    assert {score.error for score in poisoned} <= {"", reward_tasks.SCORING_KILLS.error}
    return [score.reward for score in poisoned]


def test_completion_over_which_workers_die_has_no_reward_and_all_others_have_theirs() -> None:
    assert scores_of(Poisoned(2)) == [0.0, 1.0, None, 3.0]
    assert scores_of(Poisoned(0, 1, 3)) == [None, None, 2.0, None]


def test_group_whose_first_completions_all_kill_workers_costs_a_bounded_number_of_them() -> None:
    cluster = Poisoned(*range(16), num_rows=16)
    assert scores_of(cluster) == [None] * 16
    assert cluster.num_deaths == 2 * (2 + 3), "with the others, alone, and three rows"


def test_error_that_nobody_expected_reaches_every_group_that_waits_for_it() -> None:
    class Closed(FakeRewardWorkers):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            raise AttributeError("the client is closed")

    heard = receipts_of(Closed(1, seconds_a_group=0.001), "ab", "c")
    assert heard == ["the client is closed"] * 3


def test_receipt_says_how_long_its_group_waited_to_be_scored() -> None:
    class Workers(FakeRewardWorkers):
        async def submit(self, *arguments: Any, **options: Any) -> Any:
            tables, *others = await super().submit(*arguments, **options)
            return [GroupReceipt(0, (), ()) for _ in tables], *others

    async def waits() -> list[float]:
        workers = Workers(1, seconds_a_group=0.5, seconds_a_trip=0.25)
        ready = batcher(workers)
        groups = (receipt(ready, name) for name in "ab")
        return [receipt.reward_queue_s for receipt in await asyncio.gather(*groups)]

    assert run_in_virtual_time(waits()) == pytest.approx([0.25, 1.0])


def test_pages_of_dask_group_tasks_by_role_and_by_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []

    async def wait(future: Any) -> None: ...

    monkeypatch.setattr(rollouts, "wait", wait)

    class Rollout:
        """A rollout that is finished."""

        def __init__(self, key: str) -> None:
            keys.append(key)
            self.status = "finished"

    class Naming(FakeRewardWorkers):
        def submit(self, *arguments: Any, key: str, **options: Any) -> Any:
            keys.append(key)
            return asyncio.sleep(0, (["receipt"], 0.1, 1))

        def map(self, *arguments: Any, key: list[str], **options: Any) -> list[Rollout]:
            return [*map(Rollout, key)]

    async def ask_for_everything() -> None:
        client: Any = Naming(1, seconds_a_group=0.0)
        weights: Any = SimpleNamespace(newest=lambda: 0)
        rollouts = DaskRollouts(client, weights, client, max_attempts=3)
        budget = RetryBudget(3)
        await rollouts.write(await rollouts.roll_out(episode_of(), budget), budget)
        await rollouts.answer([episode_of()], name="before")
        replicas = TrainerReplicas(client, num_ranks=1, replace=wait)
        await replicas.require_policy()
        await replicas.require_policy()

    run_in_virtual_time(ask_for_everything())
    assert [key_split(key) for key in keys] == [
        "generator/rollout",
        "reward/score_and_write",
        "generator/held_out-before",
        "reward/held_out",
        "trainer/require_policy",
        "trainer/require_policy",
    ]
    assert len(set(keys)) == len(keys)


class BrokenSandboxes:
    """A client and a pool of reward workers whose first attempts have no sandbox."""

    def __init__(self, *addresses: str, num_broken: int) -> None:
        self.registry = self
        self.executions = NO_EXECUTIONS
        self.tries: list[tuple[list[str] | None, bool]] = []
        self._workers = [SimpleNamespace(address=address) for address in addresses]
        self._num_broken = num_broken

    def present(self, role: str) -> Sequence[Any]:
        return self._workers

    async def submit(
        self, function: Any, *, is_last_try: bool, workers: list[str] | None = None, **options: Any
    ) -> str:
        self.tries.append((workers, is_last_try))
        assert options["resources"] == {"reward": 1}
        assert options.get("allow_other_workers", False) is bool(workers)
        if len(self.tries) <= self._num_broken and not is_last_try:
            raise InfrastructureError("sandboxes died 3 times over one program")
        return "unscored" if len(self.tries) <= self._num_broken else "scored"


def test_group_that_has_spent_its_attempts_on_generation_is_scored_once() -> None:
    client: Any = BrokenSandboxes("a", "b", num_broken=9)
    budget = RetryBudget(3)
    for _ in range(2):
        assert budget.spend(EpisodeError("a tool raised"))
    scoring = Scoring(client, client)
    assert asyncio.run(scoring.run(client.present, budgets=[budget])) == "unscored"
    assert client.tries == [(None, True)]
    assert not budget.exhausted


def test_failure_of_a_task_of_several_groups_is_held_against_none_of_them() -> None:
    workers = FakeRewardWorkers(1, seconds_a_group=0.001)
    budgets = [RetryBudget(1) for _ in range(3)]

    async def score() -> list[Any]:
        ready = batcher(workers)
        await receipt(ready, "a")
        tables: Any = ["b", "broken", "c"]
        waiting = map(ready.receipt, tables, budgets)
        return await asyncio.gather(*waiting, return_exceptions=True)

    heard: list[Any] = run_in_virtual_time(score())
    assert [str(each) for each in heard] == ["b!", "a verifier cannot be reached", "c!"]
    assert [(b.num_failures, b.num_collateral) for b in budgets] == [(0, 1)] * 3


@pytest.mark.parametrize(
    ("addresses", "num_broken", "tries", "expected"),
    [
        ("abc", 0, [(None, False)], "scored"),
        ("abc", 1, [(None, False), (["a"], False)], "scored"),
        ("abc", 2, [(None, False), (["a"], False), (["b"], True)], "scored"),
        ("abc", 9, [(None, False), (["a"], False), (["b"], True)], "unscored"),
        ("a", 9, [(None, False), (["a"], True)], "unscored"),
        ("", 0, [(None, True)], "scored"),
    ],
)
def test_error_of_the_infrastructure_is_tried_again_on_other_workers(
    addresses: str, num_broken: int, tries: list[tuple[list[str] | None, bool]], expected: str
) -> None:
    cluster = BrokenSandboxes(*addresses, num_broken=num_broken)
    client: Any = cluster
    scoring, function = Scoring(client, client), client.present
    assert asyncio.run(scoring.run(function, budgets=[RetryBudget(3)])) == expected
    assert cluster.tries == tries
