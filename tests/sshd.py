"""A real `sshd` on loopback, of the current user, with keys that exist for one test only."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

HOST = "127.0.0.1"


@contextmanager
def running_sshd(directory: Path) -> Iterator[tuple[str, ...]]:
    """Start a server; yield the options with which `ssh` reaches it. Skips where there is none."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh: apt-get install openssh-server openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # a root's sshd does not start without
    for name in ("host", "user"):
        key = ["-t", "ed25519", "-N", "", "-q", "-f", str(directory / name)]
        subprocess.run(["ssh-keygen", *key], check=True)
    port = _free_port()
    settings = {
        "ListenAddress": HOST,
        "Port": port,
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "AllowUsers": getpass.getuser(),
        "MaxStartups": 100,
    }
    configuration = directory / "sshd_config"
    configuration.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    public = (directory / "host.pub").read_text()
    (directory / "known_hosts").write_text(f"[{HOST}]:{port},[localhost]:{port} {public}")
    log = directory / "sshd.log"
    with log.open("w") as output:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(configuration)], stderr=output)
    try:
        _wait_until_it_listens(server, port, log)
        files = (f"-oUserKnownHostsFile={directory / 'known_hosts'}", "-i", str(directory / "user"))
        yield ("-F", "none", "-p", str(port), "-oIdentitiesOnly=yes", *files)
    finally:
        server.terminate()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_it_listens(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = monotonic() + 20
    while monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        sleep(0.05)
    pytest.fail(f"sshd did not start: {log.read_text()}")
