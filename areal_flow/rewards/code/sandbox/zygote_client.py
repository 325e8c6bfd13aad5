"""Starts a zygote in an empty environment, and asks it for runs by socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from areal_flow.core.machine import is_linux
from areal_flow.rewards.code.sandbox.inside import zygote
from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError

START_S = 60.0
"""It takes a tenth of a second."""
END_S = 1.0
"""A zygote ends when its owner has gone; one that does not is killed."""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/tmp",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_START = "import sys; sys.path.append({!r}); from inside.zygote import main; main()"
_LIBRARIES = (
    "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class ZygoteClient:
    """Starts a zygote, and asks it for runs; many at a time if need be."""

    def __init__(self, tier: str, *, modules: Sequence[str] = ("numpy",)) -> None:
        """Start a zygote; `modules` are what programs may import beside the standard library."""
        self.tier = tier
        own_path = str(Path(__file__).parent)
        folders = {name: Path(spec.origin).parent for name in modules
                 if (spec := find_spec(name)) and spec.origin}  # fmt: skip
        settings = {
            "tier": tier,
            "own_path": own_path,
            "site": sorted({str(folder.parent) for folder in folders.values()}),
            "modules": list(folders),
            "readable": _readable(folders.values()),
            "devices": [path for path in _DEVICES if Path(path).exists()],
        }
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        arguments = (str(theirs.fileno()), json.dumps(settings))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-c", _START.format(own_path), *arguments],
            env=ENVIRONMENT,
            cwd="/",
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        theirs.close()
        with os.fdopen(errors, "rb") as stderr:
            self._wait_until_ready(stderr.fileno())

    def _wait_until_ready(self, errors: int) -> None:
        self._control.settimeout(START_S)
        try:
            ready = self._control.recv(64)
        except OSError as error:
            ready, message = b"", str(error)
        else:
            message = os.pread(errors, 1 << 16, 0).decode(errors="replace").strip()
        if not ready:
            self.close()
            reason = message.splitlines()[-1] if message else "it ended without a word"
            raise SandboxError(f"sandbox tier {self.tier!r}: {reason}")
        self._control.settimeout(None)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def request(
        self, mode: str, fds: Sequence[int], limits: Limits, *, imports: bool = False
    ) -> None:
        """Ask for a run: `fds` are the socket for its reports, and its descriptors from 0 on."""
        message = {"mode": mode, "imports": imports, **asdict(limits)}
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise SandboxError(f"a sandbox's zygote is gone: {error}") from None

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def available_tiers() -> tuple[str, ...]:
    """Return the tiers of this system, the strongest first; only Linux has any."""
    return (zygote.NAMESPACES, zygote.LANDLOCK) if is_linux() else ()


def _readable(packages: Iterable[Path]) -> list[str]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for package in packages:
        folders += [package, package.with_name(f"{package.name}.libs")]
    paths = [*map(str, folders), *_LIBRARIES]
    return [path for path in dict.fromkeys(paths) if Path(path).exists()]
