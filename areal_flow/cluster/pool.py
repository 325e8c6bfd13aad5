"""The workers of a running job: who joins, dies, is sent away. In the driver's process.

| what happens                       | who says so                 | what follows              |
|------------------------------------|-----------------------------|---------------------------|
| a process registers, from wherever | the scheduler               | followers hear the number |
| a process is registered no more    | the scheduler               | its tasks run elsewhere   |
| a process ends, unasked            | its nanny, or the scheduler | a death, maybe quarantine |
| `add`, `remove`                    | the user, through `remote`  | a nanny starts or ends    |
| a worker hangs                     | `watch`                     | `replace`                 |
| the last of a role is quarantined  | the rule in `quarantine`    | `guard` raises            |
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import Any, TypeVar

import dask
from distributed import SchedulerPlugin, SpecCluster, Status
from distributed.core import rpc

from areal_flow.cluster.nanny import ENDED, nanny_specification
from areal_flow.cluster.placement import ROLES, WorkerPlacement
from areal_flow.cluster.quarantine import describe_exit
from areal_flow.cluster.registry import WorkerRecord, WorkerRegistry
from areal_flow.errors import EngineError, RunError

logger = logging.getLogger(__name__)

ELASTIC_ROLES = ("generator", "reward")
CONNECT_TIMEOUT = "distributed.comm.timeouts.connect"
RETIRE_TIMEOUT_S = 20.0
"""How long finished results may take to move off a worker that leaves."""

Result = TypeVar("Result")


class WorkerPool:
    """The live set of workers, those of the driver's own and those that joined from elsewhere."""

    def __init__(self, placements: Sequence[WorkerPlacement]) -> None:
        self.registry = WorkerRegistry()
        self._templates = {placement.role: placement for placement in reversed(placements)}
        self._first = placements
        self._cluster: SpecCluster | None = None
        self._followers: list[Callable[[int], None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._closing = False
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # Life

    def specification(self) -> dict[str, dict[str, object]]:
        """Return what `SpecCluster` starts at first."""
        return {placement.name: self._place(placement) for placement in self._first}

    def attach(self, cluster: SpecCluster) -> None:
        """Take charge of a cluster that was started with `specification` and `PoolPlugin`."""
        self._cluster = cluster

    def close(self) -> None:
        """From here on processes end because the run does."""
        self._closing = True
        self._broken.cancel()
        for task in self._background:
            task.cancel()

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end, unless the pool can do it no more.

        Raises:
            EngineError: the last worker of a role is quarantined; names it.
        """
        working = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {working, self._broken}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._broken.result()
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    @property
    def cluster(self) -> SpecCluster:
        assert self._cluster is not None, "attach comes first"
        return self._cluster

    @property
    def scheduler(self) -> Any:
        return self.cluster.scheduler

    def scheduler_ends(self) -> None:
        """The scheduler closes: with the run, or without being asked.

        Without it the cluster cannot close in good order: it would wait for workers that cannot
        register any more, and ask a scheduler that does not answer. So processes are killed.
        """
        if self._closing:
            return
        dask.config.set({CONNECT_TIMEOUT: "1 s"})
        self._break("the scheduler was ended from outside, and its tasks with it: resume")
        self.close()
        for nanny in self.cluster._created:
            _kill(nanny)
        self.cluster.status = Status.closed

    # Who is there

    def follow(self, told: Callable[[int], None]) -> None:
        """Call `told` with the number of generators, now and whenever it changes."""
        self._followers.append(told)
        told(len(self.registry.present("generator")))

    def generators(self) -> list[str]:
        """Return the addresses of generators that take work."""
        return [record.address for record in self.registry.present("generator")]

    def nanny_of(self, record: WorkerRecord) -> Any:
        """Return the nanny of one of ours, if it runs in this process already."""
        return self.cluster.workers.get(record.name) if record.is_ours else None

    def joined(self, worker: Any) -> None:
        """The scheduler has registered a process (`WorkerState`)."""
        role = next((role for role in ROLES if role in worker.resources), "")
        newcomer = WorkerRecord(
            str(worker.name),
            role,
            int(worker.resources.get(role, 0)),
            is_ours=False,
            address=worker.address,
            nanny=worker.nanny or "",
        )
        record = self.registry.joined(newcomer, now=monotonic())
        if not record.is_wanted:
            self.spawn(self._dismiss(record))
        self._tell_followers()

    def left(self, address: str) -> None:
        """The scheduler has forgotten a process."""
        record = self.registry.at(address)
        if record is None:
            return
        self.registry.left(record)
        self._tell_followers()
        if not record.is_ours:
            self._died(record, None)

    def _tell_followers(self) -> None:
        for told in self._followers:
            told(len(self.registry.present("generator")))

    # Joining and leaving on request

    async def add(self, role: str, num_workers: int) -> list[str]:
        """Start workers like the first of this role; return their names once they have joined.

        Raises:
            RunError: no such role, or it cannot grow.
            EngineError: a process did not start.
        """
        if role not in ELASTIC_ROLES:
            raise RunError(f"expected a role of {', '.join(ELASTIC_ROLES)}, found {role!r}")
        if num_workers < 1:
            raise RunError(f"expected to add 1 worker or more, found {num_workers}")
        template = self._templates[role]
        names = [self._free_name(role) for _ in range(num_workers)]
        for name in names:
            self.cluster.worker_spec[name] = self._place(replace(template, name=name))
        await self.correct()
        return names

    async def remove(self, name: str) -> None:
        """Retire a worker: finished results move to others, its tasks run again elsewhere.

        Raises:
            RunError: there is none of that name, or the run needs this one.
        """
        record = self.registry.named(name)
        if record is None:
            known = ", ".join(m.name for m in self.registry.all() if m.is_expected)
            raise RunError(f"expected the name of a worker, found {name!r}; there are: {known}")
        if record.role == "trainer":
            raise RunError(f"{name} trains and cannot be removed; stop the run instead")
        others = [m for m in self.registry.present(record.role) if m is not record]
        if record.role and not others:
            raise RunError(
                f"{name} is the last {record.title} of this run and cannot be removed; add "
                "another first"
            )
        await self._retire(record)

    async def _retire(self, record: WorkerRecord) -> None:
        record.is_leaving = True
        self._tell_followers()
        if record.address:
            retired = self.scheduler.retire_workers([record.address], remove=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(retired, RETIRE_TIMEOUT_S)
        await self._dismiss(record)

    async def _dismiss(self, record: WorkerRecord) -> None:
        """End a worker's process and its nanny for good."""
        if record.is_ours:
            self.cluster.worker_spec.pop(record.name, None)
            await self.correct()
            return
        await self._forget(record)
        await self._ask_nanny(record, "terminate")

    async def _forget(self, record: WorkerRecord) -> None:
        """Remove a process from the scheduler: its tasks run elsewhere, whatever it does."""
        if record.address in self.scheduler.workers:
            await self.scheduler.remove_worker(record.address, stimulus_id="areal-flow")

    async def _ask_nanny(self, record: WorkerRecord, request: str) -> None:
        """Ask the nanny of a worker from elsewhere; it may be gone, or hang itself."""
        if not record.nanny:
            return
        with suppress(OSError):
            async with rpc(record.nanny) as nanny:
                asked = getattr(nanny, request)(reason="areal-flow")
                await asyncio.wait_for(asked, RETIRE_TIMEOUT_S)

    async def correct(self) -> None:
        """Start and end nannies until they are what the cluster's specification says.

        Raises:
            EngineError: a process did not start.
        """
        try:
            # `await cluster` would do the same and then complain about every nanny that has ended.
            # Shielded, since it is shared: a caller that is cancelled must not cancel another's.
            await asyncio.shield(self.cluster._correct_state())
        except Exception as error:
            raise EngineError(f"a worker did not start: {error}") from error

    def _free_name(self, role: str) -> str:
        taken = {m.name for m in self.registry.all()} | set(map(str, self.scheduler.aliases))
        return next(n for i in count() if (n := f"{role}-{i}") not in taken)

    def _place(self, placement: WorkerPlacement) -> dict[str, object]:
        record = self.registry.place(placement)
        return nanny_specification(placement, lambda code: self._died(record, code))

    # Hanging and dying

    async def replace(self, record: WorkerRecord, *, why: str) -> None:
        """Kill a worker that hangs; its nanny starts another, its tasks run again."""
        logger.warning("%s: %s; its process is replaced, its work runs again", record.name, why)
        nanny = self.nanny_of(record)
        if nanny is None or not _kill(nanny):
            await self._forget(record)
            await self._ask_nanny(record, "kill")

    async def replace_named(self, name: str, *, why: str) -> None:
        """Replace the worker of this name, if it is there."""
        record = self.registry.named(name)
        if record is not None and record.address:
            await self.replace(record, why=why)

    async def revive(self) -> None:
        """Start nannies again that gave up because their process did not start."""
        if self._closing:
            return
        given_up = [m for m in self.registry.all() if m.is_wanted and self._has_ended(m)]
        for record in given_up:
            del self.cluster.workers[record.name]
            self._died(record, None)
        if given_up:
            await self.correct()

    def _has_ended(self, record: WorkerRecord) -> bool:
        nanny = self.nanny_of(record)
        return nanny is not None and nanny.status in ENDED

    def _died(self, record: WorkerRecord, exit_code: int | None) -> None:
        if self._closing or not record.is_wanted:
            return
        cause = describe_exit(exit_code)
        if not self.registry.died(record, cause, now=monotonic()):
            logger.warning("%s died (%s)", record.name, cause)
            return
        message = self.registry.rule.describe(record.name, record.title, record.deaths)
        logger.warning("%s", message)
        self.spawn(self._dismiss(record))
        self._tell_followers()
        if record.role == "trainer" or not self.registry.expected(record.role):
            self._break(f"the run has no {record.title} left: {message}, then resume")

    def _break(self, reason: str) -> None:
        """Have `guard` raise: the pool can do its work no more."""
        if not self._broken.done():
            self._broken.set_exception(EngineError(reason))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside everything else; a failure is logged."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.warning("%s", error)


def _kill(nanny: Any) -> bool:
    """Kill a nanny's process; return whether there was one. Its end may come first."""
    if not nanny.pid:
        return False
    with suppress(ProcessLookupError):
        os.kill(nanny.pid, signal.SIGKILL)
    return True


class PoolPlugin(SchedulerPlugin):
    """Tells the pool what the scheduler sees."""

    name = "areal-flow-pool"

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self._pool.joined(scheduler.workers[worker])

    def remove_worker(
        self, scheduler: Any, worker: str, *, stimulus_id: str, **options: Any
    ) -> None:
        self._pool.left(worker)

    async def before_close(self) -> None:
        self._pool.scheduler_ends()
