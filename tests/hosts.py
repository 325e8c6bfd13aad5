"""Hosts with addresses of their own, as network namespaces of this machine behind one bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

NETWORK = "10.211.77"
BRIDGE = "areal-flow"


class Host:
    """A network namespace that can be cut off from the others and joined again."""

    def __init__(self, number: int) -> None:
        self.address = f"{NETWORK}.{number}"
        self.name = f"{BRIDGE}-{number}"
        self.enter = ("ip", "netns", "exec", self.name)
        self._end = f"af-veth-{number}"

    def cut_off(self) -> None:
        _ip("link", "set", self._end, "down")

    def join(self) -> None:
        _ip("link", "set", self._end, "up")

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._end, "type", "veth", "peer", "eth0", "netns", self.name)
        _ip("link", "set", self._end, "master", BRIDGE)
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", device, "up")
        self.join()

    def remove(self) -> None:
        subprocess.run(["ip", "link", "delete", self._end], check=False)
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


@contextmanager
def network_of_hosts(count: int) -> Iterator[tuple[str, list[Host]]]:
    """Yield this machine's address on the bridge, and the hosts; skip if none can be made."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip: apt-get install iproute2")
    if subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=False).returncode:
        pytest.skip("needs to make network devices, as in a container with NET_ADMIN")
    hosts = [Host(number) for number in range(2, 2 + count)]
    with ExitStack() as afterwards:
        afterwards.callback(_ip, "link", "delete", BRIDGE)
        _ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for host in hosts:
            afterwards.callback(host.remove)
            host.make()
        yield f"{NETWORK}.1", hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
