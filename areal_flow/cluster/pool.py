"""Starts a run's workers, restarts those that end unexpectedly, and changes their number.

Runs in the driver's process.

| what happens                       | who reports it     | what follows                        |
|------------------------------------|--------------------|-------------------------------------|
| a process registers                | the scheduler      | subscribers get the number          |
| a process is registered no more    | the scheduler      | its tasks run elsewhere; the        |
|                                    |                    | trainer is restored                 |
| a process ends unexpectedly        | its launcher       | it starts again, or is quarantined  |
| workers are added or removed       | `control`,         | the launcher starts or stops some   |
|                                    | `Autoscaler`       |                                     |
| a worker hangs                     | `liveness`         | `kill`                              |
| the last of a role is quarantined  | the registry       | `guard` raises                      |
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from subprocess import PIPE
from time import monotonic, time
from typing import Any, NoReturn, TypeVar

import dask
from distributed import SchedulerPlugin
from distributed.core import clean_exception
from distributed.protocol import deserialize
from distributed.protocol.pickle import dumps

from areal_flow.cluster.launchers import Launcher
from areal_flow.cluster.launchers.child import last_line
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.open_files import allow_open_files
from areal_flow.cluster.placement import Machines, WorkerPlacement, place_beside
from areal_flow.cluster.registry import (
    UNREACHABLE,
    Executions,
    WorkerRecord,
    WorkerRegistry,
    version_conflict,
)
from areal_flow.cluster.scheduler import heartbeat_interval_s
from areal_flow.cluster.worker import VERSIONS, software_versions
from areal_flow.core.errors import ConfigError, EngineError, RunError
from areal_flow.flow.diagnosis import Balance
from areal_flow.flow.schedules import run_until_first_ends

logger = logging.getLogger(__name__)

ELASTIC_ROLES = ("generator", "reward")
"""Workers of these roles may be added and removed."""
PLANNED_STEPS = 12
"""A plan is calibrated to so many steps with one number of generators."""

JOIN_TIMEOUT_S, JOIN_S_PER_WORKER = 120.0, 1.0
RETRY_HOST_S = 10.0
"""After how long a host that could not be reached is tried again."""
START_TRIES, RETRY_START_S = 3, 2.0
"""How often, and how soon again, a host is tried before the run begins: a busy sshd drops some."""
LEAVING_LOST_AFTER_S = 60.0
"""A leaving worker without a heartbeat for this long is ended."""
RETIRE_TIMEOUT_S = 20.0
"""How long finished results may take to move off a worker that leaves."""

Result = TypeVar("Result")


class WorkerPool(SchedulerPlugin):
    """The workers of a run; a scheduler plugin, so it is called when a worker registers or ends."""

    name = "areal-flow-pool"

    def __init__(
        self, scheduler: Any, launcher: Launcher, machines: Machines, executions: Executions
    ) -> None:
        self.executions = executions
        self.scheduler = scheduler
        self.registry = WorkerRegistry()
        self._launcher = launcher
        self.machines = machines
        self._joining: dict[str, asyncio.Future[None]] = {}
        """Of workers whose end would fail the start that waits for them."""
        self._late: set[str] = set()
        """Generators that the start no longer waited for."""
        self._attempts: dict[str, object] = {}
        """Starts whose process has not ended, by worker."""
        self._join_deadlines: dict[str, asyncio.TimerHandle] = {}
        self._killed: dict[str, str] = {}
        """By name, why a worker was killed; until its end is reported."""
        self._unreachable: Counter[str] = Counter()
        """Consecutive failed connections to a worker's host, by worker."""
        self.trainer_lost = asyncio.Event()
        """Set whenever the process of a trainer rank ends."""
        self.note: Callable[..., None] = lambda event, **devices: None
        self._subscribers: list[Callable[[int], None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._closing = False
        self._broken: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        scheduler.add_plugin(self)

    # The life of the pool

    async def stop(self) -> None:
        """End all processes for good."""
        self._begin_shutdown()
        records = self.registry.all()
        await asyncio.gather(*(self._launcher.stop(record.name) for record in records))
        for record in records:
            self.note("left", **record.placement.devices)

    def _begin_shutdown(self) -> None:
        self._closing = True
        self._broken.cancel()
        for task in self._background:
            task.cancel()
        for deadline in self._join_deadlines.values():
            deadline.cancel()

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await run_until_first_ends(work, self._until_broken())

    async def _until_broken(self) -> NoReturn:
        await asyncio.shield(self._broken)

    async def before_close(self) -> None:
        """Kill all processes if the scheduler closes before the run ends.

        Workers and client would wait for a scheduler that does not answer.
        """
        if self._closing:
            return
        dask.config.set({"distributed.comm.timeouts.connect": "1 s"})
        self._break("the scheduler was ended from outside, and its tasks with it: resume")
        self._begin_shutdown()
        for record in self.registry.all():
            self._launcher.kill(record.name)

    # Which workers there are

    def subscribe(self, receive: Callable[[int], None]) -> None:
        self._subscribers.append(receive)
        receive(len(self.generators()))

    def generators(self) -> list[str]:
        return [record.address for record in self.registry.present("generator")]

    def pid(self, record: WorkerRecord) -> int | None:
        return self._launcher.pid(record.name)

    def processor_use(self, record: WorkerRecord) -> ProcessorUse:
        return self._launcher.processor_use(record.name)

    @property
    def heartbeat_s(self) -> float:
        return heartbeat_interval_s(len(self.scheduler.workers))

    def add_worker(self, scheduler: Any, worker: str) -> None:
        state = scheduler.workers[worker]
        conflict = version_conflict(state.extra.get(VERSIONS, {}), software_versions())
        placed = self.registry.named(str(state.name))
        if placed is not None and conflict:
            self.spawn(self._refuse(placed, worker, conflict))
            return
        record = self.registry.joined(
            str(state.name), worker, process=str(state.server_id), now=monotonic()
        )
        if record is None:
            logger.warning(
                "refused the worker %s, which the driver did not start: use `areal-flow workers "
                "add`",
                state.name,
            )
            self.spawn(self._unregister(worker))
            return
        del self._unreachable[record.name]
        self._cancel_deadline(record)
        self.note("joined", **record.placement.devices)
        joining = self._joining.get(record.name)
        if joining is not None and not joining.done():
            joining.set_result(None)
        if not record.is_wanted:
            self.spawn(self._launcher.stop(record.name))
        elif record.name in self._late:
            self._late.remove(record.name)
            present, expected = self.generators(), self.registry.expected("generator")
            logger.info("%s joined: %d of %d generators", record.name, len(present), len(expected))
        self._notify()

    def remove_worker(
        self, scheduler: Any, worker: str, *, stimulus_id: str, **options: Any
    ) -> None:
        record = self.registry.at(worker)
        if record is None:
            return
        record.address = ""
        if record.role == "trainer":
            self.trainer_lost.set()
        if record.role == "reward":
            self._count_executed_task(worker, self.executions.last(record.process).key)
        self._notify()

    def update_graph(self, scheduler: Any, *, keys: Iterable[Any], **options: Any) -> None:
        """Fail a generator's task when its worker dies: its group's budget decides what follows."""
        for key in keys:
            if str(key).startswith("generator/") and (task := scheduler.tasks.get(key)):
                task.suspicious = scheduler.allowed_failures

    def _count_executed_task(self, worker: str, executed: str) -> None:
        """Have Dask fail the task that a reward worker executed at its end if the next worker that
        has it ends, too; the tasks that only waited there run elsewhere, which counts nothing."""
        event = self.scheduler.get_events(worker)[-1][1]
        keys = () if event["expected"] else event["processing-tasks"]
        for task in filter(None, map(self.scheduler.tasks.get, keys)):
            task.suspicious = self.scheduler.allowed_failures if task.key == executed else 0

    def _notify(self) -> None:
        for receive in self._subscribers:
            receive(len(self.generators()))

    async def run(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in a worker's event loop, beside its tasks; return its result or error.

        The scheduler keeps a connection to each worker for this. `Client.run` would need another,
        with both ends in this process, for every call that is under way.
        """
        message = {"op": "run", "function": dumps(function), "args": dumps(arguments)}
        replies = await self.scheduler.broadcast(msg=message, workers=[address], on_error="return")
        reply = replies[address]
        if isinstance(reply, Exception):
            return reply
        is_error = reply["status"] == "error"
        result = reply["exception" if is_error else "result"]
        value = deserialize(result.header, result.frames)
        return clean_exception(value)[1] if is_error else value

    def host(self, record: WorkerRecord) -> str:
        """Return where a worker runs, as the scheduler reaches it."""
        worker = self.scheduler.workers.get(record.address)
        return str(worker.host) if worker else record.placement.host

    # Starting, leaving

    async def start_until_joined(
        self, placements: Sequence[WorkerPlacement], *, min_generators: int | None = None
    ) -> None:
        """Start workers; return once all have joined, or fail with the first that ends instead.

        Args:
            min_generators: return once so many of the generators have joined. Those that join
                later are then started again or quarantined like any worker that dies.
        """
        num_workers = sum(record.is_wanted for record in self.registry.all()) + len(placements)
        allow_open_files(num_workers, files_per_worker=self._launcher.files_per_worker)
        records = [self.registry.place(placement) for placement in placements]
        num_generators = sum(record.role == "generator" for record in records)
        max_late = 0 if min_generators is None else max(0, num_generators - min_generators)
        loop = asyncio.get_running_loop()
        self._joining |= {record.name: loop.create_future() for record in records}
        starts = {asyncio.ensure_future(self._start_and_join(record)): record for record in records}
        starting = set(starts)
        try:
            while len(starting) > max_late or any(starts[s].role != "generator" for s in starting):
                joined, starting = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*joined)
        finally:
            for record in records:
                self._joining.pop(record.name).cancel()
            for start in starting:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._late |= {starts[start].name for start in starting if not starts[start].address}

    async def _start_and_join(self, record: WorkerRecord) -> None:
        joining = self._joining[record.name]
        # It may wait in a queue. It is not cancelled halfway, since it stops an unwanted process.
        await asyncio.shield(self.spawn(self._start(record)))
        await joining

    def _set_deadline(self, record: WorkerRecord) -> None:
        """Kill the process of a worker unless it joins within `join_timeout_s`."""
        num_starting = sum(each.is_wanted and not each.address for each in self.registry.all())
        timeout_s = join_timeout_s(num_starting)

        def kill() -> None:
            del self._join_deadlines[record.name]
            why = (
                f"it did not join within {timeout_s:.0f} s: see whether it can reach the driver, "
                "and the load of its machine"
            )
            self.spawn(self.kill(record, why=why))

        self._cancel_deadline(record)
        loop = asyncio.get_running_loop()
        self._join_deadlines[record.name] = loop.call_later(timeout_s, kill)

    def _cancel_deadline(self, record: WorkerRecord) -> None:
        if deadline := self._join_deadlines.pop(record.name, None):
            deadline.cancel()

    async def retire(self, record: WorkerRecord, *, after_tasks: bool = False) -> None:
        """End a worker for good, after its finished results have moved to others.

        Args:
            after_tasks: let it finish the tasks that it executes, with no new ones.
        """
        record.is_leaving = True
        self._cancel_deadline(record)
        self._notify()
        joining = self._joining.get(record.name)
        if joining is not None and not joining.done():
            joining.set_exception(RunError(f"{record.name} was removed before it joined"))
        if after_tasks and record.address:
            await self._finish_tasks(record.address)
        if record.address:
            retired = self.scheduler.retire_workers([record.address], remove=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(retired, RETIRE_TIMEOUT_S)
        await self._launcher.stop(record.name)
        self.note("left", **record.placement.devices)

    async def _finish_tasks(self, address: str) -> None:
        closed = self.scheduler.retire_workers([address], close_workers=False, remove=False)
        with suppress(TimeoutError):
            await asyncio.wait_for(closed, RETIRE_TIMEOUT_S)
        while (worker := self.scheduler.workers.get(address)) is not None:
            await asyncio.sleep(1.0 + self.heartbeat_s)  # a heartbeat says what it executes
            if not worker.executing or time() - worker.last_seen > LEAVING_LOST_AFTER_S:
                return

    async def _unregister(self, address: str) -> None:
        """Remove a process from the scheduler, so that its tasks run elsewhere."""
        if address in self.scheduler.workers:
            await self.scheduler.remove_worker(address, stimulus_id="areal-flow")

    # Adding and removing while the run goes on

    async def add(self, role: str, num_workers: int) -> list[str]:
        """Start workers like the first one of a role; return their names once they have joined."""
        if role not in ELASTIC_ROLES:
            raise RunError(f"expected a role of {', '.join(ELASTIC_ROLES)}, found {role!r}")
        if num_workers < 1:
            raise RunError(f"expected to add 1 worker or more, found {num_workers}")
        records = self.registry.all()
        template = next(record.placement for record in records if record.role == role)
        # A worker that is leaving still holds its GPUs.
        placed = [record.placement for record in records if record.is_wanted or record.address]
        used_names = {record.name for record in records}
        free_names = (name for index in count() if (name := f"{role}-{index}") not in used_names)
        added: list[WorkerPlacement] = []
        for name in islice(free_names, num_workers):
            worker = replace(template, name=name)
            added.append(place_beside(worker, [*placed, *added], self.machines))
        try:
            await self.start_until_joined(added)
        except (EngineError, RunError):
            for placement in added:
                record = self.registry.named(placement.name)
                if record is not None:
                    await self.retire(record)
            raise
        return [placement.name for placement in added]

    async def remove(self, name: str, *, after_tasks: bool = False) -> None:
        """Retire a worker: its results move to other workers, which rerun its unfinished tasks.

        Args:
            after_tasks: let the worker finish the tasks it is executing, however long they take.
        """
        record = self.registry.named(name)
        if record is None:
            names = ", ".join(each.name for each in self.registry.all() if each.is_wanted)
            raise RunError(f"expected the name of a worker, found {name!r}; there are: {names}")
        if record.role == "trainer":
            raise RunError(f"{name} is a trainer and cannot be removed; stop the run instead")
        others = [each for each in self.registry.present(record.role) if each is not record]
        if record.address and not others:
            raise RunError(
                f"{name} is the last {record.title} of this run and cannot be removed; add "
                "another first"
            )
        await self.retire(record, after_tasks=after_tasks)

    # Hanging, dying and starting again

    async def replace(self, worker: str, *, why: str) -> None:
        """Kill a worker that has joined, by address or name; a new process replaces it.

        Once this returns, no task goes to the old process any more.
        """
        record = self.registry.at(worker) or self.registry.named(worker)
        if record is not None and (address := record.address):
            await self.kill(record, why=why)
            await self._unregister(address)

    async def kill(self, record: WorkerRecord, *, why: str) -> None:
        """Kill a worker that hangs, even while it starts; its tasks run again."""
        logger.warning("%s: %s; restarting it, its tasks are rescheduled", record.name, why)
        self._killed[record.name] = why
        if not self._launcher.kill(record.name):
            del self._killed[record.name]  # it has ended by itself
            await self._unregister(record.address)

    async def _refuse(self, record: WorkerRecord, address: str, why: str) -> None:
        self._killed[record.name] = why
        await self._unregister(address)
        self._launcher.kill(record.name)

    async def _start_later(self, record: WorkerRecord, cause: str, *, delay_s: float) -> None:
        if not self._unreachable[record.name]:
            logger.warning("%s: %s; tried again every %.0f s", record.name, cause, delay_s)
        self._unreachable[record.name] += 1
        await asyncio.sleep(delay_s)
        await self._start(record)

    async def _start(self, record: WorkerRecord) -> None:
        """Start a worker's process; the old one is unregistered first, since both have one name."""
        await self._unregister(record.address)
        if self._closing or not record.is_wanted:
            return
        num_deaths = len(record.deaths)
        attempt = self._attempts[record.name] = object()
        try:
            await self._launcher.start(record.placement, partial(self._died, record))
        except EngineError as error:
            self._died(record, str(error))
            return
        if not record.is_wanted:  # it was removed meanwhile
            await self._launcher.stop(record.name)
            return
        if self._attempts.get(record.name) is attempt and not record.address:
            self._set_deadline(record)
        if not self._launcher.keeps_devices and 0 < num_deaths == len(record.deaths):
            self.note("started", **record.placement.devices)

    def _died(self, record: WorkerRecord, cause: str) -> None:
        cause = self._killed.pop(record.name, cause)
        self._attempts.pop(record.name, None)
        self._cancel_deadline(record)
        if self._closing or not record.is_wanted:
            return
        joining = self._joining.get(record.name)
        begins = joining is not None and not joining.done()
        gives_up = begins and self._unreachable[record.name] + 1 >= START_TRIES
        if cause.startswith(UNREACHABLE) and not record.joined_at and not gives_up:
            # The host is to blame: neither a death nor, after three, a reason for a quarantine.
            delay_s = RETRY_START_S if begins else RETRY_HOST_S
            self.spawn(self._start_later(record, cause, delay_s=delay_s))
            return
        if joining is not None and begins:
            joining.set_exception(_start_failure(record, cause))
            return
        record.died(cause, now=monotonic(), last=self.executions.last(record.process))
        event = "died" if self._launcher.keeps_devices else "queued"
        self.note(event, **record.placement.devices)
        if not record.is_quarantined:
            logger.warning("%s died (%s)", record.name, cause)
            self.spawn(self._start(record))
            return
        message = record.why_quarantined()
        logger.warning("%s", message)
        self.spawn(self._launcher.stop(record.name))
        self._notify()
        if record.role == "trainer" or not self.registry.expected(record.role):
            self._break(f"the run has no {record.title} left: {message}, then resume")

    def _break(self, reason: str) -> None:
        """Make `guard` raise."""
        if not self._broken.done():
            self._broken.set_exception(EngineError(reason))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._spawned_ended)
        return task

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.warning("%s", error)


def join_timeout_s(num_starting: int) -> float:
    """Return how long a started process may take to join, beside so many that start.

    120 s + 1 s a worker: a cold environment on a network file system takes a minute to import, all
    that start share its server, and the driver admits one after the other.
    """
    return JOIN_TIMEOUT_S + JOIN_S_PER_WORKER * num_starting


def _start_failure(record: WorkerRecord, cause: str) -> EngineError:
    where = f" on {record.placement.host}" if record.placement.host else ""
    return EngineError(
        f"expected {record.name} to start{where}, but its process ended first ({cause}). Nothing "
        "was trained; fix the error printed above, then start again"
    )


class Autoscaler:
    """Changes the number of generators within its bounds.

    Decisions count the generators that have joined. One that waits in a queue delays no decision,
    and is withdrawn when it is no longer needed. A leaving generator finishes its rollouts.
    """

    def __init__(
        self, pool: WorkerPool, bounds: tuple[int, int] | None, *, planner: Sequence[str] = ()
    ) -> None:
        """Take the bounds, without which the number stays, and the command of a planner, if one is
        to choose it: after a step and a number, it prints how many generators there should be by
        the steps from that one on, which had this number."""
        self._pool, self._planner = pool, planner
        steps = {"window_steps": PLANNED_STEPS} if planner else {}
        self._balance = Balance(*bounds, **steps) if bounds else None
        self._is_planning = False

    def after_step(self, row: Mapping[str, Any]) -> None:
        """Take in a step's row of the ledger; a change is made beside training."""
        expected = self._pool.registry.expected("generator")
        joined = [record for record in expected if record.address]
        if self._balance is None or self._is_planning:
            return
        rows = self._balance.window(row, number=len(joined))
        if rows:
            self._is_planning = True
            self._pool.spawn(self._change(self._balance, rows, len(joined)))

    async def _change(
        self, balance: Balance, rows: Sequence[Mapping[str, Any]], number: int
    ) -> None:
        try:
            if self._planner:
                arguments = map(str, (rows[0]["step"], number))
                target = min(await _printed_by(*self._planner, *arguments), balance.max_number)
            else:
                target = balance.target_number(rows, number=number)
            if target != number:
                logger.info("generators: %d -> %d, for balance with the trainer", number, target)
            expected = self._pool.registry.expected("generator")
            expected.sort(key=lambda record: not record.address)
            for record in expected[target:]:
                self._pool.spawn(self._pool.remove(record.name, after_tasks=True))
            for _ in range(target - len(expected)):
                self._pool.spawn(self._add(balance, number))
        except RunError as error:
            logger.warning("the number of generators stays: %s", error)
        finally:
            self._is_planning = False

    async def _add(self, balance: Balance, number: int) -> None:
        try:
            await self._pool.add("generator", 1)
        except RunError as error:
            logger.info("%s", error)
        except (ConfigError, EngineError) as error:
            balance.max_number = number
            logger.warning("no more than %d generators: %s", number, error)


async def _printed_by(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RunError(f"the planner failed: {last_line(errors)}")
    return int(output)
