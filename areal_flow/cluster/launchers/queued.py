"""Workers as jobs of a system that decides when and where they start; each ends with the driver.

A job's supervisor (`areal_flow.cluster.supervisor`) first connects to the driver, with TLS as all
processes of a run, at one port for all jobs: its token says which job it is. It ends the worker
when the driver ends, even by force.

| what happens            | who reports it       | what follows                               |
|-------------------------|----------------------|--------------------------------------------|
| a job starts            | its connection       | `start` returns                            |
| a worker ends           | its connection       | the jobs are listed, every second          |
| a job ends in the queue | the list             | it counts as a death                       |
| a node is lost          | either of them       | its job is cancelled and counts as a death |
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import socket
import sys
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlsplit

from areal_flow.cluster.certificates import connection_security
from areal_flow.cluster.launchers.child import (
    NUM_LAST_BYTES,
    cause_of_exit,
    import_paths,
    last_line,
    take_reports,
)
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.staging import StagedStarts
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WORKER_PROGRAM, WorkerPlacement
from areal_flow.cluster.supervisor import END, GRACE_S, KILL, TO_DRIVER
from areal_flow.cluster.worker import worker_options
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import EngineError

logger = logging.getLogger(__name__)

ENDING_LIMIT_S = 30.0
"""How long the system may take to say how a job ended, before it is cancelled."""
MAX_SUBMITTING = 4
"""Jobs that are being submitted at a time, each by a process of its own."""
MAX_UNACCEPTED = 1024
"""How many jobs may connect at the same moment."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class JobState(NamedTuple):
    """What the system says of a job: at most one of the first two is true."""

    is_waiting: bool = False
    has_ended: bool = False
    reason: str = ""
    """Why it waits, why the system ended it, or what its program said last, if that is known."""
    exit_code: int | None = None
    """Of its program, as a shell or as `Popen` reports it, if it ended by itself."""


class Job:
    """One job of a worker, from its submission to its end."""

    submission: asyncio.Future[None]

    def __init__(self, name: str, on_exit: Callable[[str], None], logs: Path) -> None:
        self.name = name
        self.on_exit = on_exit
        self.token = secrets.token_hex(16)
        """What its connection begins with; no other process of the run knows it."""
        self.token_file = logs / f"{name}-{secrets.token_hex(4)}.token"
        self.id = ""
        """Empty until the system has accepted it."""
        self.connection: StreamWriter | None = None
        self.begun = asyncio.Event()
        """Set when it has connected, or has ended."""
        self.disconnected = asyncio.Event()
        self.ending_since: float | None = None
        """When its connection ended, or it was killed."""
        self.is_stopping = False
        self.processor_use = ProcessorUse()
        """As its supervisor reported it last."""
        self.reported_waits: set[str] = set()

    async def hold(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Hold the job's connection, and read its reports, until the job ends it."""
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection = writer
        self.forget_token()
        self.begun.set()
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                self.processor_use = take_reports(line)[1] or self.processor_use
        self.ending_since = self.ending_since or monotonic()
        self.disconnected.set()

    def forget_token(self) -> None:
        with suppress(OSError):
            self.token_file.unlink()

    def close(self) -> None:
        self.forget_token()
        self.begun.set()
        if self.connection is not None:
            self.connection.close()


class QueuedLauncher(ABC):
    """Submits, watches and cancels jobs; a subclass says by which commands."""

    program: str
    """What submits a job."""
    noun: str
    """What a job is called in messages, such as `Slurm job`."""
    keeps_devices = False
    files_per_worker = 1
    poll_s = 10.0
    """How often the jobs are listed while nothing seems to end."""
    needs_delete = False
    """Whether ended jobs stay in the system until they are cancelled."""

    def __init__(
        self, scheduler: str, settings: ClusterSettings, fork_server: ForkServer, logs: Path
    ) -> None:
        self.scheduler = scheduler
        self._host = urlsplit(scheduler).hostname or ""
        self.settings = settings
        self.logs = logs
        self._jobs: dict[str, Job] = {}
        self._server: asyncio.Server | None = None
        """Where jobs connect, while there are any."""
        self._opening = asyncio.Lock()
        self._submissions = StagedStarts(MAX_SUBMITTING)
        self._watching: asyncio.Future[None] | None = None

    @abstractmethod
    def describe(self, placement: WorkerPlacement, port: object, token: Path) -> str:
        """Return what is submitted: a job that sends the token to this port of the driver."""

    @abstractmethod
    async def submit(self, placement: WorkerPlacement, port: int, token: Path) -> str:
        """Submit a worker's job and return its id; like all commands, fail by an `OSError`."""

    @abstractmethod
    async def list_jobs(self) -> Mapping[str, JobState]:
        """Return the jobs that wait or run, and those that ended lately."""

    @abstractmethod
    async def cancel(self, job_id: str) -> None: ...

    def commands(
        self, placement: WorkerPlacement, port: object, token: Path, python: str = sys.executable
    ) -> str:
        """Return a command for bash that becomes the supervisor, which connects to the driver."""
        network = self.settings.network
        certificates = str(network.tls_directory or "CERTIFICATES")
        driver = (TO_DRIVER, self._host, str(port), certificates, str(token))
        worker = worker_options(placement, self.scheduler, network)
        supervisor = (python, "-P", "-m", "areal_flow.cluster.supervisor", *driver)
        return f"exec {shlex.join((*supervisor, '-P', *WORKER_PROGRAM, worker))}"

    def variables(self, placement: WorkerPlacement) -> dict[str, str]:
        paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
        return PROCESS_ENVIRONMENT | placement.environment | paths

    def log(self, name: str, job_id: str) -> Path:
        return self.logs / f"{name}-{job_id.rpartition('-')[2]}.log"

    def preview(self, placement: WorkerPlacement) -> str:
        return self.describe(placement, "PORT", self.logs / f"{placement.name}-ID.token")

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        """Submit a worker's job; return when it runs, however long it waits in the queue."""
        job = self._jobs[placement.name] = Job(placement.name, on_exit, self.logs)
        job.submission = asyncio.ensure_future(self._submit(job, placement))
        await asyncio.shield(job.submission)  # without its id a job could not be cancelled
        await job.begun.wait()

    async def _submit(self, job: Job, placement: WorkerPlacement) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            job.token_file.touch(0o600)
            job.token_file.write_text(f"{job.token}\n")
            port = await self._listen()
            async with self._submissions.turn(self.program):
                job.id = await self.submit(placement, port, job.token_file)
        except (OSError, ValueError) as error:
            self._ended(job)
            raise EngineError(f"{job.name} cannot be submitted: {error}") from error
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    async def _listen(self) -> int:
        """Return the port where jobs connect; open it for the first one."""
        async with self._opening:
            if self._server is None:
                tls = connection_security(self.settings.network).get_listen_args("scheduler")
                self._server = await asyncio.start_server(
                    self._accept, self._host, 0, ssl=tls["ssl_context"], backlog=MAX_UNACCEPTED
                )
            port: int = self._server.sockets[0].getsockname()[1]
            return port

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Give a connection to the job whose token it sends first; refuse any other."""
        try:
            token = (await reader.readline()).decode(errors="replace").strip()
        except (OSError, ValueError):
            token = ""
        job = next((job for job in self._jobs.values() if job.token == token), None)
        if job is None or job.connection:
            writer.close()
        else:
            await job.hold(reader, writer)

    def kill(self, name: str) -> bool:
        job = self._jobs.get(name)
        if job is None or job.connection is None:
            return False
        job.connection.write(KILL)
        job.ending_since = job.ending_since or monotonic()
        return True

    async def stop(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is None:
            return
        job.is_stopping = True
        await asyncio.wait([job.submission])
        if job.connection is not None:
            with suppress(OSError, TimeoutError):
                job.connection.write(END)
                await asyncio.wait_for(job.disconnected.wait(), GRACE_S + 3.0)
        if job.id and (self.needs_delete or not job.disconnected.is_set()):
            await self._cancel(job)
        self._ended(job)

    def pid(self, name: str) -> int | None:
        return None  # it is a process of another machine

    def processor_use(self, name: str) -> ProcessorUse:
        job = self._jobs.get(name)
        return job.processor_use if job else ProcessorUse()

    async def _watch(self) -> None:
        """List all jobs at once, again and again, until there are none."""
        while self._jobs:
            for _ in range(int(self.poll_s)):
                await asyncio.sleep(1.0)
                if any(job.ending_since for job in self._jobs.values()):
                    break
            submitted = [job for job in self._jobs.values() if job.id]
            try:
                states = await self.list_jobs()
            except (OSError, ValueError) as error:  # it fails, or prints what is no list
                logger.warning("the workers' jobs cannot be listed, tried again: %s", error)
                continue
            for job in submitted:
                if not job.is_stopping and self._jobs.get(job.name) is job:
                    await self._look(job, states.get(job.id))

    async def _look(self, job: Job, state: JobState | None) -> None:
        if state is None or state.has_ended:
            last_output = _last_line(self.log(job.name, job.id))
            cause = cause_of_end(f"{self.noun} {job.id}", state, last_output)
            if state is not None and self.needs_delete:
                await self._cancel(job)
            self._ended(job, cause)
        elif job.ending_since and monotonic() - job.ending_since > ENDING_LIMIT_S:
            await self._cancel(job)
            self._ended(job, f"{self.noun} {job.id}: its node does not answer")
        elif state.is_waiting and not job.reported_waits & {kind := state.reason.partition(":")[0]}:
            job.reported_waits.add(kind)
            logger.warning("%s waits as %s %s (%s)", job.name, self.noun, job.id, state.reason)

    async def _cancel(self, job: Job) -> None:
        try:
            await self.cancel(job.id)
        except OSError as error:
            logger.warning("%s %s of %s was not cancelled: %s", self.noun, job.id, job.name, error)

    def _ended(self, job: Job, cause: str = "") -> None:
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
            job.close()
            if not self._jobs and self._server is not None:
                self._server.close()
                self._server = None
            if cause:
                job.on_exit(cause)


def cause_of_end(job: str, state: JobState | None, last_output: str) -> str:
    """Return in words why a job ended; what it said last matters only if it ended by itself."""
    if state is None:
        return f"{job} ended, and is no longer listed"
    if state.exit_code is None:
        return f"{job}: {state.reason}"
    return cause_of_exit(state.exit_code, last_output or state.reason)


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_LAST_BYTES))
            return last_line(file.read())
    except OSError:
        return ""
