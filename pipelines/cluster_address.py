"""The address of a running job's scheduler, for commands from another terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import find_run, observed_state

if TYPE_CHECKING:
    from areal_flow.cluster.launch import RunningCluster


def dashboard_text(url: str, environment: Mapping[str, str] = os.environ) -> str:
    text = f"Dask dashboard: {url}"
    if "SSH_CONNECTION" in environment:
        tunnel = tunnel_to(url, environment)
        text += f"\nTo open it on the machine you came from, run there: {tunnel}"
    return text


def tunnel_to(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the ssh command that forwards a page of this machine to another one."""
    address, option, machine = urlsplit(url), "", gethostname()
    if ssh := environment.get("SSH_CONNECTION"):  # address and port of the client, of the server
        *_, host, port = ssh.split()
        option, machine = f"-p {port} ", f"{getuser()}@{host}"
    return f"ssh -N {option}-L {address.port}:{address.netloc} {machine}"


@contextmanager
def reachable(layout: RunLayout, cluster: RunningCluster) -> Iterator[None]:
    """Record the scheduler's address in the run directory while the cluster is up."""
    address = {
        "scheduler": cluster.scheduler,
        "dashboard": cluster.dashboard,
        "pid": os.getpid(),
        "network": cluster.network.model_dump(mode="json"),
    }
    text = json.dumps(address)
    replace_file(layout.cluster, text)
    target = layout.prometheus_target
    target.parent.mkdir(exist_ok=True)
    replace_file(target, json.dumps([{"targets": [urlsplit(cluster.dashboard).netloc]}]))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if layout.cluster.read_text() == text:  # else another driver took over
                layout.cluster.unlink()
                target.unlink()


def scheduler_of(runs: Path, name: str) -> tuple[str, NetworkSettings]:
    """Return the address of a run's scheduler, and the network settings to connect to it."""
    layout = find_run(runs, name)
    state = observed_state(layout).state
    if state != "running":
        raise RunError(f"run {name!r} has no workers: it is {state}, not running")
    try:
        address = json.loads(layout.cluster.read_text())
        return address["scheduler"], NetworkSettings.model_validate(address["network"])
    except FileNotFoundError:
        raise RunError(f"run {name!r} has no workers yet: its cluster is being started") from None
