"""Tests a tier with a program that tries all that is forbidden; the tier fails if one succeeds."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

from areal_flow.core.machine import is_linux, system_name
from areal_flow.rewards.code.sandbox.inside import program
from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.code.sandbox.run import Program, run_programs
from areal_flow.rewards.code.sandbox.zygote_client import ZygoteClient, available_tiers

NO_TIER = (
    "model-written code is not run here: no sandbox passes its self-test ({reasons}). Expected "
    "Linux 5.13 or newer on x86_64 or aarch64 with seccomp, and user namespaces or Landlock: allow "
    "them (sysctl user.max_user_namespaces, the container's seccomp profile), or run reward "
    "workers where they are"
)
LOST = {
    "namespaces": "",
    "landlock": "without user namespaces programs have no /tmp, and can see names of files",
}
"""What a tier lacks, in words."""
_CANARIES = """
import ctypes, json, os, socket, sys
def connect():
    socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
def read_home():
    if not any(os.access(path, os.F_OK) and open(path, "rb") for path in {home!r}): raise OSError
def write():
    open({folder!r} + "/canary", "w").close()
def trace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0) < 0: raise OSError
def spawn():
    if os.fork() == 0: os._exit(0)
canaries = dict(
    read_home=read_home,
    read_file=lambda: open({folder!r} + "/secret").read(),
    write_file=write,
    delete_file=lambda: os.unlink({folder!r} + "/secret"),
    read_environment=lambda: open("/proc/{owner}/environ", "rb").read(),
    see_processes=lambda: os.listdir("/proc"),
    signal_owner=lambda: os.kill({owner}, 0),
    open_socket=lambda: socket.socket(),
    connect=connect,
    fork=spawn,
    execute=lambda: os.execv(sys.executable or "/bin/true", ["true"]),
    trace=trace,
    become_root=lambda: os.setuid(0),
    change_mode=lambda: os.chmod("/usr/lib", 0o755),
)
can = []
for name, canary in canaries.items():
    try:
        canary()
    except OSError:
        continue
    except Exception as error:
        can.append(name + ": " + repr(error))
    else:
        can.append(name)
print(json.dumps(can))
"""


def choose_tier(tiers: tuple[str, ...] | None = None) -> str:
    """Return the strongest tier that passes its self-test, of those given or of all."""
    reasons = []
    for tier in available_tiers() if tiers is None else tiers:
        try:
            zygote = ZygoteClient(tier, modules=())
            try:
                check_tier(zygote)
            finally:
                zygote.close()
        except (SandboxError, OSError) as error:
            reasons.append(f"{tier}: {error}")
        else:
            return tier
    nothing = "none is allowed" if is_linux() else f"this is {system_name()}"
    raise SandboxError(NO_TIER.format(reasons="; ".join(reasons) or nothing))


def check_tier(zygote: ZygoteClient) -> None:
    """Hold a zygote to what its tier promises."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder).chmod(0o777)
        (Path(folder) / "secret").write_text("secret")
        home = [str(path) for path in Path.home().iterdir() if path.is_file()]
        source = _CANARIES.format(
            port=server.getsockname()[1], folder=folder, home=home[:9], owner=os.getpid()
        )
        (result,) = run_programs(
            zygote, [Program(program.SCRIPT, source.encode())], Limits(cpu_s=10)
        )
        if result.exit_code or result.timed_out:
            errors = result.stderr.decode(errors="replace").strip().splitlines()
            raise SandboxError(
                f"a program does not run: {errors[-1] if errors else result.exit_code}"
            )
        if can := json.loads(result.stdout):
            raise SandboxError(f"a program can do what it must not: {', '.join(can)}")
        if not (Path(folder) / "secret").exists():
            raise SandboxError("a program can delete files")
