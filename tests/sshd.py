"""Real `sshd`s of the current user, with keys that exist for one test only."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

HOST = "127.0.0.1"
LOOPBACK: Mapping[str, Sequence[str]] = {HOST: ()}


@contextmanager
def running_sshd(
    directory: Path,
    hosts: Mapping[str, Sequence[str]] = LOOPBACK,
    *,
    max_startups: str = "100",
) -> Iterator[tuple[str, ...]]:
    """Start a server a host; yield the options with which `ssh` reaches each.

    Skips where there is no such program.

    Args:
        hosts: by the address, what a command on that host begins with.
        max_startups: connections that each server lets authenticate at a time.
    """
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh: apt-get install openssh-server openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # a root's sshd does not start without
    for name in ("host", "user"):
        key = ["-t", "ed25519", "-N", "", "-q", "-f", str(directory / name)]
        subprocess.run(["ssh-keygen", *key], check=True)
    port = _free_port()
    public = (directory / "host.pub").read_text()
    names = ",".join(f"[{name}]:{port}" for name in [*hosts, "localhost"])
    (directory / "known_hosts").write_text(f"{names} {public}")
    with ExitStack() as servers:
        for address, enter in hosts.items():
            servers.enter_context(_server(directory, address, port, enter, max_startups))
        files = (f"-oUserKnownHostsFile={directory / 'known_hosts'}", "-i", str(directory / "user"))
        yield ("-F", "none", "-p", str(port), "-oIdentitiesOnly=yes", *files)


@contextmanager
def _server(
    directory: Path, address: str, port: int, enter: Sequence[str], max_startups: str
) -> Iterator[None]:
    settings = {
        "ListenAddress": address,
        "Port": port,
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "AllowUsers": getpass.getuser(),
        "MaxStartups": max_startups,
    }
    configuration, log = directory / f"config-{address}", directory / f"log-{address}"
    configuration.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    command = [*enter, str(SSHD), "-D", "-e", "-f", str(configuration)]
    with log.open("w") as output:
        server = subprocess.Popen(command, stderr=output)
    try:
        _wait_until_it_listens(server, address, port, log)
        yield
    finally:
        server.terminate()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_it_listens(
    server: subprocess.Popen[bytes], address: str, port: int, log: Path
) -> None:
    deadline = monotonic() + 20
    while monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        sleep(0.05)
    pytest.fail(f"sshd did not start: {log.read_text()}")
