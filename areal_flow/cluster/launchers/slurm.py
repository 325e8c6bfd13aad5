"""Starts each worker as a Slurm job, which ends with the driver.

A job first connects to the driver. The connection is the standard input of its supervisor
(`areal_flow.cluster.supervisor`), so that the worker ends when the driver does, even by force.

| what happens            | who reports it       | what follows                               |
|-------------------------|----------------------|--------------------------------------------|
| a job starts            | its connection       | `start` returns                            |
| a worker ends           | its connection       | `squeue` is asked how, every second        |
| a job ends in the queue | `squeue`, every 10 s | it counts as a death                       |
| a node is lost          | either of them       | its job is cancelled and counts as a death |
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlsplit

from areal_flow.cluster.launchers.child import import_paths
from areal_flow.cluster.launchers.standby import StandbyWorkers
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WORKER_PROGRAM, WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.supervisor import GRACE_S, KILL
from areal_flow.cluster.worker_process import worker_options
from areal_flow.errors import EngineError

logger = logging.getLogger(__name__)

ENDING_LIMIT_S = 30.0
"""How long Slurm may take to say how a job ended, before it is cancelled."""
COMMAND_LIMIT_S = 60.0
SQUEUE = (
    *("squeue", "--me", "--states=all", "--noheader"),
    "--Format=JobID:20,State:20,exit_code:12,Reason:60",
)
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
)
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}

SCRIPT = """\
#!/bin/bash
{directives}
export {variables}
exec 0<>/dev/tcp/{host}/{port} || exit 1
echo {token} >&0
exec {command}
"""
"""Slurm shows it to its user only. The certificate is in files that the worker's options name."""


class JobState(NamedTuple):
    """What `squeue` says of a job."""

    state: str
    wait_status: int
    reason: str


class Job:
    """One job of a worker, from its submission to its end."""

    submission: asyncio.Future[None]

    def __init__(self, name: str, on_exit: Callable[[str], None]) -> None:
        self.name = name
        self.on_exit = on_exit
        self.token = secrets.token_hex(16)
        """What its connection begins with: nobody else can connect in its place."""
        self.number = ""
        """Empty until Slurm has accepted it."""
        self.server: asyncio.Server | None = None
        self.connection: StreamWriter | None = None
        self.begun = asyncio.Event()
        """Set when it has connected, or has ended."""
        self.disconnected = asyncio.Event()
        self.ending_since: float | None = None
        """When its connection ended, or it was killed."""
        self.is_stopping = self.is_wait_reported = False

    async def accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Hold the job's connection until the job ends it; refuse any other."""
        try:
            line = await reader.readline()
        except (OSError, ValueError):
            line = b""
        if self.connection or line.decode(errors="replace").strip() != self.token:
            writer.close()
            return
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection = writer
        self.begun.set()
        with suppress(OSError):
            await reader.read()
        self.ending_since = self.ending_since or monotonic()
        self.disconnected.set()

    def close(self) -> None:
        self.begun.set()
        for end in (self.server, self.connection):
            if end is not None:
                end.close()


class SlurmLauncher:
    """Workers as jobs of the driver's user; Slurm decides when and where they start."""

    def __init__(
        self, scheduler: str, settings: ClusterSettings, standby: StandbyWorkers, logs: Path
    ) -> None:
        self._scheduler = scheduler
        self._host = urlsplit(scheduler).hostname or ""
        self._settings = settings
        self._logs = logs
        self._jobs: dict[str, Job] = {}
        self._watching: asyncio.Future[None] | None = None

    def preview(self, placement: WorkerPlacement) -> str:
        return self._script(placement, "PORT", "TOKEN")

    def _script(self, placement: WorkerPlacement, port: object, token: str) -> str:
        """Return the batch script of a worker, which connects to this port of the driver."""
        jobs = ("all", placement.role)
        given = [each for key, each in sorted(self._settings.slurm.items()) if key in jobs]
        options = [
            *(f"--job-name={placement.name}", "--nodes=1", "--ntasks=1"),
            f"--cpus-per-task={placement.num_cores}",
            *([f"--gpus={placement.num_gpus}"] if placement.num_gpus else []),
            *chain.from_iterable(given),
            *(f"--chdir={Path.cwd()}", f"--output={self._log(placement.name, '%j')}"),
            "--no-requeue",  # the pool submits it again
        ]
        paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
        variables = PROCESS_ENVIRONMENT | placement.environment | paths
        supervised = (sys.executable, "-m", "areal_flow.cluster.supervisor", *WORKER_PROGRAM)
        worker = worker_options(placement, self._scheduler, self._settings.network)
        return SCRIPT.format(
            directives="\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
            variables=" ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items()),
            host=self._host,
            port=port,
            token=token,
            command=shlex.join((*supervised, worker)),
        )

    def _log(self, name: str, number: str) -> Path:
        return self._logs / f"{name}-{number}.log"

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        """Submit a worker's job; return when it runs, however long it waits in the queue."""
        job = self._jobs[placement.name] = Job(placement.name, on_exit)
        job.submission = asyncio.ensure_future(self._submit(job, placement))
        await asyncio.shield(job.submission)  # without its number a job could not be cancelled
        await job.begun.wait()

    async def _submit(self, job: Job, placement: WorkerPlacement) -> None:
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            job.server = await asyncio.start_server(job.accept, self._host, 0)
            port = job.server.sockets[0].getsockname()[1]
            script = self._script(placement, port, job.token)
            answer = await _run("sbatch", "--parsable", given=script)
        except OSError as error:
            self._ended(job)
            raise EngineError(f"{job.name} cannot be submitted: {error}") from error
        job.number = answer.strip().partition(";")[0]
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

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
                job.connection.write_eof()
                await asyncio.wait_for(job.disconnected.wait(), GRACE_S + 3.0)
        if job.number and not job.disconnected.is_set():
            await _cancel(job)
        self._ended(job)

    def pid(self, name: str) -> int | None:
        return None  # it is a process of another machine

    async def _watch(self) -> None:
        """Ask `squeue` about all jobs at once, again and again, until there are none."""
        while self._jobs:
            for _ in range(10):
                await asyncio.sleep(1.0)
                if any(job.ending_since for job in self._jobs.values()):
                    break
            try:
                states = job_states(await _run(*SQUEUE))
            except OSError as error:
                logger.warning("squeue failed, and is asked again: %s", error)
                continue
            for job in [*self._jobs.values()]:
                if job.number and not job.is_stopping:
                    await self._look(job, states.get(job.number))

    async def _look(self, job: Job, found: JobState | None) -> None:
        if found is None or found.state in ENDED:
            line = _last_line(self._log(job.name, job.number))
            self._ended(job, cause_of_end(job.number, found, line))
        elif job.ending_since and monotonic() - job.ending_since > ENDING_LIMIT_S:
            await _cancel(job)
            self._ended(job, f"Slurm job {job.number}: its node does not answer")
        elif found.state == "PENDING" and not job.is_wait_reported:
            job.is_wait_reported = True
            logger.warning("%s waits as Slurm job %s (%s)", job.name, job.number, found.reason)

    def _ended(self, job: Job, cause: str = "") -> None:
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
            job.close()
            if cause:
                job.on_exit(cause)


def job_states(listed: str) -> dict[str, JobState]:
    """Return the states of jobs by number, from what `squeue` prints."""
    rows = [line.split(None, 3) for line in listed.splitlines()]
    return {number: JobState(state, int(code), why.strip()) for number, state, code, why in rows}


def cause_of_end(number: str, found: JobState | None, last_line: str) -> str:
    """Return in words why a job ended."""
    if found is None:
        return f"Slurm job {number} ended, and Slurm no longer lists it"
    if found.state not in ("COMPLETED", "FAILED"):
        return f"Slurm job {number}: {found.state}"
    code = os.waitstatus_to_exitcode(found.wait_status)
    signal = -code if code < 0 else code - 128  # as shells and the supervisor report it
    if signal > 0:
        return f"killed by signal {signal}"
    return f"exit status {code}{last_line and ': '}{last_line}"


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().rpartition("\n")[2].strip()
    except OSError:
        return ""


async def _cancel(job: Job) -> None:
    try:
        await _run("scancel", job.number)
    except OSError as error:
        logger.warning("Slurm job %s of %s was not cancelled: %s", job.number, job.name, error)


async def _run(*command: str, given: str = "") -> str:
    """Run one of Slurm's commands and return what it prints; raise an `OSError` if it fails."""
    # Variables of the driver's own job, if it runs in one, do not hold for the workers' jobs.
    own = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    outside = {name: value for name, value in os.environ.items() if name not in own}
    run = partial(subprocess.run, input=given, env=outside, timeout=COMMAND_LIMIT_S, text=True)
    try:
        done = await asyncio.to_thread(run, command, capture_output=True)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} took longer than {COMMAND_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise OSError(" ".join(done.stderr.split()) or f"{command[0]}: status {done.returncode}")
    return str(done.stdout)
