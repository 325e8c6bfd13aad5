"""The pool restarts workers that exit, quarantines those that keep dying, and assigns GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import Machines, WorkerPlacement, place_beside
from areal_flow.cluster.pool import RETRY_START_S, START_TRIES, WorkerPool, join_timeout_s
from areal_flow.cluster.registry import NUM_DEATHS_OVER_TASKS, Execution, Executions
from areal_flow.cluster.worker import VERSIONS, software_versions
from areal_flow.core.errors import ConfigError, EngineError, RunError
from areal_flow.planning.virtual_time import run_in_virtual_time


class FakeScheduler:
    """Knows which processes are registered, and reports it to its plugin as Dask's does."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.tasks: dict[str, Any] = {}
        self.allowed_failures = 3
        self.versions = software_versions()

    def add_plugin(self, plugin: Any) -> None:
        self._plugin = plugin

    def register(self, placement: WorkerPlacement, address: str) -> None:
        assert placement.name not in self.aliases, "a duplicate name: Dask refuses it"
        self.aliases[placement.name] = address
        self.workers[address] = SimpleNamespace(
            name=placement.name,
            resources=placement.resources,
            address=address,
            server_id=address.replace("/", "-"),
            extra={VERSIONS: self.versions},
            executing={},
            last_seen=time(),
            processing=[task for task in self.tasks.values() if task.role == placement.role],
        )
        self._plugin.add_worker(self, address)

    async def remove_worker(self, address: str, *, stimulus_id: str) -> None:
        worker = self.workers.pop(address)
        del self.aliases[worker.name]
        for task in worker.processing:
            task.suspicious += 1
            if task.suspicious > self.allowed_failures:
                del self.tasks[task.key]
        keys = {task.key for task in worker.processing}
        self._event = {"processing-tasks": keys, "expected": stimulus_id == "retired"}
        self._plugin.remove_worker(self, address, stimulus_id=stimulus_id)

    def get_events(self, address: str) -> list[tuple[float, dict[str, Any]]]:
        return [(0.0, self._event)]

    async def retire_workers(
        self, addresses: list[str], *, remove: bool, close_workers: bool = True
    ) -> None:
        for address in addresses if remove else ():
            await self.remove_worker(address, stimulus_id="retired")


class FakeLauncher:
    """Processes that join at once unless their worker is broken; they end when a test says so."""

    keeps_devices = True
    files_per_worker = 0

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.scheduler = scheduler
        self.broken: dict[str, str] = {}
        self.silent: set[str] = set()
        self.queued: set[str] = set()
        self.begun = asyncio.Event()
        """Set when the jobs in the queue begin."""
        self.num_started = 0
        self.running: dict[str, Callable[[str], None]] = {}

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        name = placement.name
        assert name not in self.running
        self.num_started += 1
        if name in self.queued:
            self.running[name] = on_exit
            await self.begun.wait()
            return
        if self.broken.get(name) == "no process":
            raise EngineError(f"{name} cannot be started: no such program")
        self.running[name] = on_exit
        loop = asyncio.get_running_loop()
        if name in self.broken:
            loop.call_soon(self.end, name, self.broken[name])
        elif name not in self.silent:
            address = f"tcp://{self.num_started}"
            loop.call_soon(self.scheduler.register, placement, address)

    def end(self, name: str, cause: str) -> None:
        self.running.pop(name)(cause)

    def kill(self, name: str) -> bool:
        if name in self.running:
            self.end(name, "killed by signal 9")
            return True
        return False

    async def stop(self, name: str) -> None:
        self.running.pop(name, None)

    def pid(self, name: str) -> int | None:
        return 1 if name in self.running else None

    def processor_use(self, name: str) -> ProcessorUse:
        return ProcessorUse()


TWO = [WorkerPlacement(f"generator-{index}", "generator", 4) for index in range(2)]
TRAINER = WorkerPlacement("trainer-0", "trainer", 1)


def with_pool(
    test: Callable[[WorkerPool, FakeLauncher], Awaitable[None]], machines: Machines | None = None
) -> None:
    async def run() -> None:
        scheduler = FakeScheduler()
        launcher = FakeLauncher(scheduler)
        with TemporaryDirectory() as folder:
            executions = Executions(Path(folder))
            pool = WorkerPool(scheduler, launcher, machines or Machines(), executions)
            await test(pool, launcher)
            await pool.stop()
        assert launcher.running == {}

    run_in_virtual_time(run())


def test_worker_that_the_driver_did_not_start_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        launcher.scheduler.register(WorkerPlacement("stranger", "generator", 4), "tcp://stranger")
        await asyncio.sleep(0.1)
        assert "tcp://stranger" not in launcher.scheduler.workers
        assert pool.generators() == ["tcp://1", "tcp://2"]
        assert "refused the worker stranger" in caplog.text

    with_pool(test)


def test_worker_with_other_versions_than_the_driver_is_refused_with_the_reason() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.scheduler.versions = {**software_versions(), "torch": "1.0"}
        with pytest.raises(EngineError, match=r"it has torch 1.0 \(expected .*install"):
            await pool.start_until_joined(TWO)
        assert not launcher.scheduler.workers

    with_pool(test)


def test_process_that_exits_is_restarted_and_subscribers_get_the_numbers() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([*TWO, TRAINER])
        numbers: list[int] = []
        pool.subscribe(numbers.append)
        launcher.end("generator-0", "exit status 1: out of memory")
        await asyncio.sleep(1)
        assert numbers == [2, 1, 2]
        record = pool.registry.named("generator-0")
        assert record is not None
        assert [death.cause for death in record.deaths] == ["exit status 1: out of memory"]
        assert record.address in pool.scheduler.workers
        assert not pool.trainer_lost.is_set()
        launcher.end("trainer-0", "killed by signal 9")
        await asyncio.sleep(1)
        assert pool.trainer_lost.is_set()

    with_pool(test)


@pytest.mark.parametrize(
    ("keeps_devices", "death"), [(True, ("died",)), (False, ("queued", "started"))]
)
def test_every_join_death_and_leave_of_a_worker_is_recorded(
    keeps_devices: bool, death: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(FakeLauncher, "keeps_devices", keeps_devices)

    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        pool.note = lambda event, **details: noted.append((event, details["worker"]))
        await pool.start_until_joined(TWO)
        launcher.end("generator-0", "killed by signal 9")
        await asyncio.sleep(1)
        await pool.remove("generator-1")

    with_pool(test)
    assert noted[:2] == [("joined", "generator-0"), ("joined", "generator-1")]
    *again, left = noted[2 : 4 + len(death)]
    assert again == [(event, "generator-0") for event in (*death, "joined")]
    assert left == ("left", "generator-1")
    assert set(noted[4 + len(death) :]) == {("left", "generator-0"), ("left", "generator-1")}, (
        "with the run"
    )


def test_queued_worker_that_is_removed_does_not_start_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(FakeLauncher, "keeps_devices", False)

    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        withdrawn = asyncio.Event()

        async def wait_in_queue(*_: object) -> None:
            await withdrawn.wait()

        stop_process = launcher.stop

        async def stop(name: str) -> None:
            withdrawn.set()
            await stop_process(name)

        await pool.start_until_joined(TWO)
        pool.note = lambda event, **details: noted.append(event)
        monkeypatch.setattr(launcher, "start", wait_in_queue)
        monkeypatch.setattr(launcher, "stop", stop)
        launcher.end("generator-0", "preempted")
        await asyncio.sleep(1)
        await pool.remove("generator-0")
        await asyncio.sleep(1)
        assert noted == ["queued", "left"]

    with_pool(test)


def test_worker_that_keeps_dying_is_quarantined_and_the_last_of_its_role_breaks_the_pool() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        for _ in range(3):
            launcher.end("generator-0", "killed by signal 9")
            await asyncio.sleep(1)
        num_started = launcher.num_started
        assert list(launcher.running) == ["generator-1"]
        launcher.broken["generator-1"] = "no process"
        launcher.end("generator-1", "killed by signal 9")
        with pytest.raises(EngineError, match=r"no generator left.*cannot be started"):
            await pool.guard(asyncio.sleep(60))
        assert launcher.num_started == num_started + 2

    with_pool(test)


REWARD = WorkerPlacement("reward-0", "reward", 1)


@pytest.mark.parametrize("is_noticed_first", [True, False])
def test_task_that_kills_reward_workers_is_given_up_at_the_second_death_and_condemns_none(
    is_noticed_first: bool,
) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        tasks = launcher.scheduler.tasks
        await pool.start_until_joined([REWARD])
        record = pool.registry.named("reward-0")
        assert record is not None

        async def die(over: str = "", *, num_ended: int = 1) -> None:
            if over:
                pool.executions.note(record.process, Execution(over, num_ended))
            if is_noticed_first:
                await launcher.scheduler.remove_worker(record.address, stimulus_id="its end")
            launcher.end("reward-0", "exit status 1")
            await asyncio.sleep(1)

        for key in "abcx":
            tasks[key] = SimpleNamespace(key=key, role="reward", suspicious=0)
        for key in "abc":
            await die()  # of the process that executed no task yet
            for _ in range(2):
                assert key in tasks
                await die(key)
            assert key not in tasks
        assert "x" in tasks, "it only waited"
        assert not record.is_quarantined
        for _ in range(NUM_DEATHS_OVER_TASKS):
            assert not record.is_quarantined
            await die("x", num_ended=0)
            tasks["x"] = SimpleNamespace(key="x", role="reward", suspicious=0)
        assert record.is_quarantined
        assert f"died {NUM_DEATHS_OVER_TASKS} times in a row" in record.why_quarantined()

    with_pool(test)


def test_task_of_a_generator_fails_with_its_worker_and_its_group_decides_what_follows() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        tasks = launcher.scheduler.tasks
        keys = ["generator/rollout-00000000-0-1-0", "other"]
        for key in keys:
            tasks[key] = SimpleNamespace(key=key, role="generator", suspicious=0)
        pool.update_graph(launcher.scheduler, keys=[*keys, "forgotten"])
        await pool.start_until_joined(TWO[:1])
        launcher.end("generator-0", "killed by signal 9")
        await asyncio.sleep(1)
        assert [*tasks] == ["other"]

    with_pool(test)


def test_worker_on_an_unreachable_host_is_retried_without_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        await asyncio.sleep(60)
        launcher.broken["generator-0"] = "ssh ended: no route to host"
        launcher.end("generator-0", "ssh ended")
        await asyncio.sleep(300)
        record = pool.registry.named("generator-0")
        assert record is not None
        assert [death.cause for death in record.deaths] == ["ssh ended"]
        assert launcher.num_started == 2 + 30
        assert caplog.text.count("no route to host; tried again every 10 s") == 1
        del launcher.broken["generator-0"]
        await asyncio.sleep(11)
        assert len(pool.generators()) == 2

    with_pool(test)


def test_reward_worker_that_dies_without_a_task_is_quarantined() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([REWARD])
        record = pool.registry.named("reward-0")
        assert record is not None
        for _ in range(3):
            assert not record.is_quarantined
            launcher.end("reward-0", "exit status 1")
            await asyncio.sleep(1)
        assert record.is_quarantined

    with_pool(test)


@pytest.mark.parametrize(
    ("broken", "cause"),
    [("exit status 1: no model", "no model"), ("no process", "no such program")],
)
def test_worker_that_does_not_start_ends_the_start_with_its_cause(broken: str, cause: str) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.broken["generator-1"] = broken
        with pytest.raises(EngineError, match=rf"generator-1 to start.*{cause}.*start again"):
            await pool.start_until_joined(TWO)
        assert launcher.num_started == 2

    with_pool(test)


def test_worker_that_ends_at_its_start_is_noticed_while_others_wait_in_a_queue() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.queued |= {placement.name for placement in TWO}
        launcher.broken["trainer-0"] = "exit status 1: No module named 'areal_flow'"
        with pytest.raises(EngineError, match=r"trainer-0 to start.*No module named 'areal_flow'"):
            await asyncio.wait_for(pool.start_until_joined([*TWO, TRAINER]), 10)

    with_pool(test)


def test_host_that_refuses_a_connection_at_the_start_is_tried_three_times() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.broken["generator-0"] = "ssh ended: Connection closed by remote host"
        starting = asyncio.ensure_future(pool.start_until_joined(TWO))
        await asyncio.sleep(RETRY_START_S / 2)
        del launcher.broken["generator-0"]
        await starting
        assert len(pool.generators()) == 2
        launcher.broken["generator-2"] = "ssh ended: Connection closed by remote host"
        with pytest.raises(EngineError, match=r"generator-2 to start.*closed by remote host"):
            await pool.add("generator", 1)
        assert launcher.num_started == 3 + START_TRIES

    with_pool(test)


def test_start_has_a_limit_and_names_who_is_missing() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.silent.add("generator-1")
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match=r"generator-1 to start.*not join within 122 s"):
            await pool.start_until_joined(TWO)
        assert asyncio.get_running_loop().time() - began == pytest.approx(join_timeout_s(2))

    with_pool(test)


EIGHT = [WorkerPlacement(f"generator-{index}", "generator", 4) for index in range(8)]


def test_start_ends_with_the_least_number_of_generators_and_the_others_join_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.queued |= {placement.name for placement in EIGHT[3:]}
        numbers: list[int] = []
        pool.subscribe(numbers.append)
        await asyncio.wait_for(pool.start_until_joined([*EIGHT, TRAINER], min_generators=3), 10)
        assert (len(pool.generators()), len(pool.registry.expected("generator"))) == (3, 8)
        with caplog.at_level("INFO"):
            launcher.scheduler.register(EIGHT[7], "tcp://late")
        assert "generator-7 joined: 4 of 8 generators" in caplog.text
        assert numbers[-1] == 4

    with_pool(test)


def test_no_trainer_is_missing_when_training_starts_with_few_generators() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.queued.add("trainer-0")
        starting = asyncio.ensure_future(
            pool.start_until_joined([*EIGHT, TRAINER], min_generators=3)
        )
        await asyncio.sleep(1000)
        assert not starting.done()
        launcher.scheduler.register(TRAINER, "tcp://trainer")
        launcher.begun.set()
        await starting

    with_pool(test)


def test_generator_that_dies_at_its_late_start_is_tried_again_and_then_quarantined() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.queued |= {"generator-3", "generator-4"}
        await pool.start_until_joined(EIGHT[:5], min_generators=3)
        launcher.queued.clear()
        launcher.broken["generator-3"] = "exit status 1: no model"
        launcher.begun.set()
        launcher.end("generator-3", "its node was lost")
        launcher.end("generator-4", "its node was lost")
        await asyncio.sleep(10)
        states = {record.name: record.is_quarantined for record in pool.registry.all()}
        assert [name for name, is_quarantined in states.items() if is_quarantined] == [
            "generator-3"
        ]
        assert len(pool.generators()) == 4

    with_pool(test)


def test_late_generator_that_starts_but_never_joins_is_killed_and_quarantined() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.silent.add("generator-1")
        await pool.start_until_joined(TWO, min_generators=1)
        await asyncio.sleep(4 * join_timeout_s(2))
        (record,) = [each for each in pool.registry.all() if each.name == "generator-1"]
        assert record.is_quarantined
        assert "did not join within 121 s" in record.deaths[-1].cause
        assert launcher.running.keys() == {"generator-0"}

    with_pool(test)


def test_job_that_waits_in_its_queue_has_no_deadline_to_join() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        launcher.queued.add("generator-1")
        await pool.start_until_joined(TWO, min_generators=1)
        await asyncio.sleep(100_000)
        assert not any(record.deaths for record in pool.registry.all())

    with_pool(test)


def test_added_worker_that_does_not_start_is_taken_back() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        launcher.broken["generator-3"] = "exit status 1: no memory"
        with pytest.raises(EngineError, match="generator-3 to start"):
            await pool.add("generator", 2)
        await asyncio.sleep(1)
        assert set(launcher.running) == {"generator-0", "generator-1"}
        assert len(pool.generators()) == 2

    with_pool(test)


def test_removed_worker_is_stopped_and_stays_away() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([*TWO, TRAINER])
        await pool.remove("generator-0")
        await asyncio.sleep(1)
        assert set(launcher.running) == {"generator-1", "trainer-0"}
        for name in ("generator-1", "trainer-0", "generator-0"):
            with pytest.raises(RunError):
                await pool.remove(name)

    with_pool(test)


def test_worker_that_leaves_may_finish_what_it_executes() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        leaving = pool.generators()[0]
        worker = launcher.scheduler.workers[leaving]
        worker.executing = {"a rollout": 1.0}
        removal = asyncio.ensure_future(pool.remove("generator-0", after_tasks=True))
        await asyncio.sleep(600)
        assert leaving not in pool.generators()
        assert leaving in launcher.scheduler.workers
        running = pool.registry.running("generator")
        assert [record.name for record in running] == ["generator-0", "generator-1"], (
            "it is sent new weights"
        )
        worker.executing = {}
        await removal
        assert set(launcher.scheduler.workers) == set(pool.generators())
        assert set(launcher.running) == {"generator-1"}

    with_pool(test)


def test_worker_is_replaced_by_address_or_name_but_not_while_it_starts() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([*TWO, TRAINER])
        await pool.replace(pool.generators()[0], why="it hangs")
        launcher.silent.add("trainer-0")
        await pool.replace("trainer-0", why="its group has ended")
        assert "trainer-0" not in pool.scheduler.aliases, "no task goes to the old process"
        await asyncio.sleep(1)
        assert launcher.num_started == 5
        await pool.replace("trainer-0", why="its group has ended")
        await pool.replace("", why="nobody")
        await asyncio.sleep(1)
        assert launcher.num_started == 5

    with_pool(test)


def test_killed_worker_dies_of_the_reason_of_the_kill() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([WorkerPlacement("reward-0", "reward", 1)])
        record = pool.registry.named("reward-0")
        assert record is not None
        await pool.kill(record, why="silent for 12 s")
        await asyncio.sleep(1)
        launcher.end("reward-0", "exit status 3")
        await asyncio.sleep(1)
        assert [death.cause for death in record.deaths] == ["silent for 12 s", "exit status 3"]
        await pool.kill(record, why="silent for 12 s")
        with pytest.raises(
            EngineError, match=r"no reward worker left.* 12 s\)\. A verifier .*hang"
        ):
            await pool.guard(asyncio.sleep(60))

    with_pool(test)


def test_worker_that_exits_before_a_kill_keeps_its_own_cause_next_time() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        record = pool.registry.all()[0]
        launcher.end("generator-0", "exit status 1")
        await pool.kill(record, why="its group has ended")
        await asyncio.sleep(1)
        launcher.end("generator-0", "exit status 3")
        await asyncio.sleep(1)
        assert [death.cause for death in record.deaths] == ["exit status 1", "exit status 3"]

    with_pool(test)


def test_scheduler_that_ends_ends_the_pool_and_every_process() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        working = asyncio.ensure_future(pool.guard(asyncio.sleep(60)))
        await asyncio.sleep(1)
        await pool.before_close()
        with pytest.raises(EngineError, match="the scheduler was ended from outside"):
            await working
        assert launcher.running == {}
        assert launcher.num_started == 2

    with_pool(test)


def test_worker_is_added_on_a_free_gpu_or_not_at_all() -> None:
    machines = Machines(gpus=("0", "1"))
    needing = WorkerPlacement("generator-0", "generator", 4, num_gpus=1)

    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined([place_beside(needing, [], machines)])
        assert await pool.add("generator", 1) == ["generator-1"]
        with pytest.raises(ConfigError, match=r"expected 1 free GPU\(s\).* found 0 of 2"):
            await pool.add("generator", 1)
        await pool.remove("generator-0")
        assert await pool.add("generator", 1) == ["generator-2"]
        placed = {m.name: m.placement.gpus for m in pool.registry.all() if m.placement}
        assert placed == {
            "generator-0": ("0",),
            "generator-1": ("1",),
            "generator-2": ("0",),
        }

    with_pool(test, machines)
