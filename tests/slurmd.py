"""A real Slurm on loopback, of the current user, that exists for one test only."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

HOST = "127.0.0.1"
PROGRAMS = (
    *("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scancel", "squeue", "sinfo"),
)
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
NUM_CORES = 64
"""What a node claims to have: a test may start more workers than its machine has cores."""
NUM_GPUS = 8
PREEMPTING = "preempting"
"""A partition whose jobs preempt those of the default one."""
LIMIT_S = 30.0


@contextmanager
def running_slurm(directory: Path, *nodes: str) -> Iterator[None]:
    """Start the daemons; Slurm's commands of this process and its children reach them.

    Skips where a program is missing.

    Args:
        directory: of the daemons.
        nodes: names of nodes, all of them this machine with `NUM_GPUS` that it only claims to have;
            by default one, `node`, without any.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    directory.chmod(0o755)
    configuration = directory / "slurm.conf"
    configuration.write_text(_configuration(directory, nodes))
    for number in range(NUM_GPUS):
        (directory / f"gpu{number}").touch()
    devices = f"Name=gpu File={directory}/gpu[0-{NUM_GPUS - 1}]\n"
    (directory / "gres.conf").write_text(devices if nodes else "")
    (directory / "key").write_bytes(secrets.token_bytes(128))
    (directory / "key").chmod(0o400)
    munge = [f"--{name}={directory / name}" for name in ("socket", "pid-file", "seed-file")]
    munge += [f"--key-file={directory / 'key'}", f"--log-file={directory / 'munged.log'}"]
    slurm = ("-D", "-f", str(configuration))
    with ExitStack() as daemons, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(configuration))
        for command in (
            ("munged", "--foreground", "--force", *munge),
            ("slurmctld", *slurm, "-c"),
            *(("slurmd", *slurm, "-N", node) for node in nodes or ("node",)),
        ):
            daemons.enter_context(_daemon(command, directory))
        _wait_until_idle(directory)
        try:
            yield
        finally:
            _end_jobs(directory)


@contextmanager
def allocation() -> Iterator[None]:
    """Hold a job without processes, for the commands of this process and its children."""
    granted = subprocess.run(
        ["salloc", "--no-shell", "--ntasks=1", "--time=60"],
        capture_output=True,
        text=True,
        check=True,
    )
    (number,) = re.findall(r"Granted job allocation (\d+)", granted.stderr)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", number)
        patch.setenv("SLURM_JOB_NODELIST", "node")
        yield
    subprocess.run(["scancel", number], check=True)


def job_numbers(*names: str, states: str = "") -> list[str]:
    """Return the numbers of the jobs that wait, run or end; of some workers, if they are named."""
    chosen = [f"--name={','.join(names)}"] if names else []
    chosen += [f"--states={states}"] if states else []
    listed = _output("squeue", "--me", "--noheader", "--format=%i", *chosen)
    return listed.split()


def nodes_of_steps() -> list[str]:
    """Return where the steps run that `srun` started, sorted."""
    listed = _output("squeue", "--me", "--steps", "--noheader", "--format=%i %N")
    rows = (line.split() for line in listed.splitlines())
    return sorted(node for step, node in rows if step.rpartition(".")[2].isdecimal())


def _configuration(directory: Path, nodes: Sequence[str]) -> str:
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"localhost({HOST})",
        "SlurmctldPort": _free_port(),
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={directory / 'socket'}",
        "CredType": "cred/munge",
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool-%n",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "slurmd-%n.pid",
        "SlurmctldLogFile": directory / "slurmctld.log",
        "SlurmdLogFile": directory / "slurmd.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu",
        "MpiDefault": "none",
        "KillWait": 10,
        "ReturnToService": 2,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "CANCEL",
    }
    partitions = {"test": "PriorityTier=1 Default=YES", PREEMPTING: "PriorityTier=2"}
    (directory / "state").mkdir()
    gpus = f" Gres=gpu:{NUM_GPUS}" if nodes else ""
    lines = [f"{name}={value}" for name, value in settings.items()]
    for node in nodes or ("node",):
        (directory / f"spool-{node}").mkdir()
        lines.append(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={HOST} "
            f"Port={_free_port()} CPUs={NUM_CORES} State=UNKNOWN{gpus}"
        )
    for name, rules in partitions.items():
        lines.append(f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP {rules}")
    return "\n".join([*lines, ""])


@contextmanager
def _daemon(command: Sequence[str], directory: Path) -> Iterator[None]:
    program = shutil.which(command[0], path=PATH)
    assert program is not None
    with (directory / f"{command[0]}.out").open("ab") as output:
        daemon = subprocess.Popen([program, *command[1:]], stdout=output, stderr=output)
    try:
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _wait_until_idle(directory: Path) -> None:
    deadline = monotonic() + LIMIT_S
    while monotonic() < deadline:
        with suppress(subprocess.CalledProcessError):
            if {*_output("sinfo", "--noheader", "--format=%T").split()} == {"idle"}:
                return
        sleep(0.2)
    logs = "\n".join(path.read_text() for path in sorted(directory.glob("*.out")))
    pytest.fail(f"Slurm did not start: {logs}")


def _end_jobs(directory: Path) -> None:
    """Cancel all jobs, and wait for the processes that watch them: those outlive `slurmd`."""
    for number in job_numbers():
        subprocess.run(["scancel", number], check=False)
    deadline = monotonic() + LIMIT_S
    while monotonic() < deadline and (job_numbers() or _steps(directory)):
        sleep(0.2)
    for step in _steps(directory):
        step.kill()


def _steps(directory: Path) -> list[psutil.Process]:
    """Return the processes of this Slurm that each watch a job."""
    processes = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            log = str(directory / "slurmd.log")
            if process.info["name"].startswith("slurmstepd") and any(
                opened.path == log for opened in process.open_files()
            ):
                processes.append(process)
    return processes


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
