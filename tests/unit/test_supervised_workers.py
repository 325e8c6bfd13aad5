"""Workers on other machines: what their supervisors report, and how many `ssh` connects at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.cluster import liveness
from areal_flow.cluster.certificates import connection_security, with_certificates
from areal_flow.cluster.launchers import make_launcher
from areal_flow.cluster.launchers.child import Child, take_reports
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.queued import MAX_SUBMITTING, JobState, QueuedLauncher
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.registry import WorkerRegistry
from areal_flow.cluster.supervisor import KILL, TO_DRIVER
from areal_flow.config.cluster import ClusterSettings, NetworkSettings, RemoteSettings
from areal_flow.planning.virtual_time import run_in_virtual_time

BUSY = "import os\nos.write(1, b'half a line')\nwhile True: pass"
SUPERVISED = [sys.executable, "-m", "areal_flow.cluster.supervisor"]
PLACEMENT = WorkerPlacement("generator-0", "generator", 1)


def two_reports(lines: Any) -> list[ProcessorUse]:
    reports = [take_reports(lines.readline())[1] for _ in range(2)]
    return [use for use in reports if use is not None]


@pytest.mark.parametrize("is_connection", [False, True])
def test_supervisor_reports_processor_time_to_its_driver(
    is_connection: bool, tmp_path: Path
) -> None:
    network = with_certificates(NetworkSettings(), tmp_path)
    context = connection_security(network).get_listen_args("scheduler")["ssl_context"]
    (tmp_path / "token").write_text("token\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        to_driver = [TO_DRIVER, "127.0.0.1", port, str(tmp_path), str(tmp_path / "token")]
        command = [*SUPERVISED, *(to_driver if is_connection else []), "-c", BUSY]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
            reports: Any = supervisor.stdout
            if is_connection:
                driver = context.wrap_socket(server.accept()[0], server_side=True)
                reports = driver.makefile("rb")
                assert reports.readline() == b"token\n"
            first, second = two_reports(reports)
            if is_connection:
                driver.sendall(KILL)
            else:
                os.write(supervisor.stdin.fileno(), KILL)  # type: ignore[union-attr]
            assert supervisor.wait(10) == 128 + signal.SIGKILL
    assert second.processor_s is not None
    assert first.processor_s is not None
    assert second.processor_s > first.processor_s + 0.05


def test_reports_are_no_output() -> None:
    output = b"a line\nhalf \x1eareal-flow 1.50 R\nof one\n\x1eareal-flow 2.00 D\n\x1eareal-f"
    rest, use = take_reports(output)
    assert rest == b"a line\nhalf of one\n\x1eareal-f"
    assert use == ProcessorUse(2.0, waits_for_storage=True)
    assert take_reports(b"a line\n") == (b"a line\n", None)
    assert take_reports(b"\x1eareal-flow nan ?\n")[1] == ProcessorUse()


class QueuedByHand(QueuedLauncher):
    """A queue whose jobs are the test's connections."""

    program, noun = "true", "job"

    def __init__(self, settings: ClusterSettings, logs: Path) -> None:
        super().__init__("tls://127.0.0.1:1", settings, ForkServer(), logs)
        self.ports: list[int] = []
        self.tokens: dict[str, bytes] = {}

    def describe(self, placement: WorkerPlacement, port: object, token: Path) -> str:
        return placement.name

    async def submit(self, placement: WorkerPlacement, port: int, token: Path) -> str:
        self.ports.append(port)
        self.tokens[placement.name] = token.read_bytes()
        return placement.name

    async def list_jobs(self) -> dict[str, JobState]:
        return {name: JobState() for name in self.tokens}

    async def cancel(self, job_id: str) -> None:
        pass


async def test_jobs_report_at_one_port_that_is_open_while_there_are_any(tmp_path: Path) -> None:
    network = with_certificates(NetworkSettings(), tmp_path)
    launcher = QueuedByHand(ClusterSettings(network=network), tmp_path)
    tls = connection_security(network).get_connection_args("client")["ssl_context"]
    names = [f"generator-{number}" for number in range(3)]
    placements = [WorkerPlacement(name, "generator", 1) for name in names]
    starts = [asyncio.ensure_future(launcher.start(each, lambda _: None)) for each in placements]

    async def connect(first_line: bytes, report: bytes = b"") -> StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", launcher.ports[0], ssl=tls)
        connections.append(writer)
        writer.write(first_line + report)
        await writer.drain()
        return reader

    connections: list[StreamWriter] = []
    async with asyncio.timeout(20):
        while len(launcher.tokens) < len(names):
            await asyncio.sleep(0.01)
        assert len(set(launcher.ports)) == 1
        for number, name in reversed([*enumerate(names, 1)]):  # not in the order of submission
            await connect(launcher.tokens[name], b"\x1eareal-flow %d.5 R\n" % number)
        await asyncio.gather(*starts)
        while not all(launcher.processor_use(name).processor_s > 0 for name in names):
            await asyncio.sleep(0.01)
        seconds = [launcher.processor_use(name).processor_s for name in names]
        assert seconds == [1.5, 2.5, 3.5]
        for refused in (b"a stranger\n", launcher.tokens[names[0]]):
            assert await (await connect(refused)).read() == b""
        for writer in connections:
            writer.close()
        for name in names:
            await launcher.stop(name)
        with pytest.raises(ConnectionRefusedError):
            await connect(launcher.tokens[names[0]])


class RemotePool:
    """A pool with one worker on another host, silent since it joined."""

    heartbeat_s = 0.5

    def __init__(self, processor_share: float | None) -> None:
        self.registry, self._share = WorkerRegistry(), processor_share
        self.registry.place(PLACEMENT)
        self.registry.joined(PLACEMENT.name, "tcp://far", process="p", now=0.0)
        worker = SimpleNamespace(last_seen=0.0, host="far", pid=1, metrics={})
        self.scheduler = SimpleNamespace(workers={"tcp://far": worker}, ip="here")
        self.killed_at: list[float] = []

    def pid(self, record: Any) -> None:
        return None

    def processor_use(self, record: Any) -> ProcessorUse:
        if self._share is None:
            return ProcessorUse()
        return ProcessorUse(self._share * asyncio.get_running_loop().time())

    def spawn(self, work: Any) -> None:
        self._killing = asyncio.ensure_future(work)

    async def kill(self, record: Any, *, why: str) -> None:
        self.killed_at.append(asyncio.get_running_loop().time())


@pytest.mark.parametrize(("processor_share", "killed_at"), [(1.0, 62), (0.0, 12), (None, 12)])
def test_remote_worker_that_is_busy_without_a_heartbeat_is_given_a_minute(
    processor_share: float | None, killed_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch() -> list[float]:
        monkeypatch.setattr(liveness, "monotonic", asyncio.get_running_loop().time)
        pool: Any = RemotePool(processor_share)
        watching = asyncio.ensure_future(liveness.watch_health(pool, ClusterSettings()))
        await asyncio.sleep(70)
        watching.cancel()
        return pool.killed_at

    assert run_in_virtual_time(watch())[0] == pytest.approx(killed_at, abs=1)


SSH = """#!/bin/sh
here=$(dirname "$0")
touch "$here/connecting-$$"
[ $(ls "$here" | grep -c connecting) -gt 9 ] && exit 255
sleep 0.4
rm "$here/connecting-$$"
for last; do :; done
exec sh -c "$last"
"""
"""An `ssh` to this machine, whose server drops what exceeds nine connections that are made."""
SUPERVISOR = "#!/bin/sh\nprintf '\\036areal-flow 0.5 R\\n'\nexec cat\n"


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


async def test_twelve_workers_of_a_host_connect_without_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    supervisor = program(tmp_path / "supervisor", SUPERVISOR)
    remote = RemoteSettings(hosts=("localhost",), python=str(supervisor))
    launcher = make_launcher("tcp://here:1", ClusterSettings(launcher="ssh", remote=remote))
    names, ended = [f"reward-{number}" for number in range(12)], list[str]()
    workers = [WorkerPlacement(name, "reward", 1, host="localhost") for name in names]
    await asyncio.gather(*(launcher.start(worker, ended.append) for worker in workers))
    assert [launcher.processor_use(name).processor_s for name in names] == [0.5] * 12
    await asyncio.gather(*(launcher.stop(name) for name in names))
    assert ended == []


SRUN = """#!/bin/sh
here=$(dirname "$0")
touch "$here/starting-$$"
[ $(ls "$here" | grep -c starting) -gt 16 ] && exit 1
sleep 0.4
rm "$here/starting-$$"
printf '\\036areal-flow 0.5 R\\n'
exec cat
"""
"""An `srun` whose controller serves sixteen requests at a time."""


async def test_steps_on_all_nodes_are_requested_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    launcher = make_launcher("tcp://here:1", ClusterSettings(launcher="srun"))
    names, ended = [f"reward-{number}" for number in range(20)], list[str]()
    workers = [WorkerPlacement(name, "reward", 1, host=f"node-{name}") for name in names]
    await asyncio.gather(*(launcher.start(worker, ended.append) for worker in workers))
    assert [launcher.processor_use(name).processor_s for name in names] == [0.5] * 20
    await asyncio.gather(*(launcher.stop(name) for name in names))
    assert ended == []


class SlowQueue(QueuedByHand):
    """A queue that takes its time to accept a job."""

    num_submitting = most_submitting = 0

    async def submit(self, placement: WorkerPlacement, port: int, token: Path) -> str:
        self.num_submitting += 1
        self.most_submitting = max(self.most_submitting, self.num_submitting)
        await asyncio.sleep(0.01)
        self.num_submitting -= 1
        return await super().submit(placement, port, token)


async def test_jobs_are_submitted_few_at_a_time_and_wait_in_the_queue_together(
    tmp_path: Path,
) -> None:
    network = with_certificates(NetworkSettings(), tmp_path)
    queue = SlowQueue(ClusterSettings(network=network), tmp_path)
    names = [f"generator-{number}" for number in range(3 * MAX_SUBMITTING)]
    placements = [WorkerPlacement(name, "generator", 1) for name in names]
    starts = [asyncio.ensure_future(queue.start(each, lambda _: None)) for each in placements]
    async with asyncio.timeout(20):
        while len(queue.tokens) < len(names):
            await asyncio.sleep(0.01)
    assert queue.most_submitting == MAX_SUBMITTING
    assert not any(start.done() for start in starts)
    await asyncio.gather(*map(queue.stop, names))
    await asyncio.gather(*starts)


def test_reports_leave_the_last_lines_of_a_process() -> None:
    reading, writing = os.pipe()
    child = SimpleNamespace(
        _output=SimpleNamespace(fileno=lambda: reading),
        _last_lines=b"",
        _unended_line=b"",
        _log=lambda line: None,
        supervised=SimpleNamespace(set=lambda: None),
    )
    for line in (b"why it ended\n", *[b"\x1eareal-flow 1.0 S\n"] * 3000):
        os.write(writing, line)
        Child._pass_output_on(child)  # type: ignore[arg-type]
    os.close(reading)
    os.close(writing)
    assert child._last_lines.strip() == b"why it ended"
