"""What this machine gives a process: cores, memory, open files, GPUs, and the one GPU by turns."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import psutil

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container says how much memory it may use, in versions 2 and 1."""

MAX_COPYING_THREADS = 4

MAX_OPEN_FILES = 65_536
"""More than 10,000 workers need."""

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of `mallopt`, in glibc's malloc.h."""


def is_linux() -> bool:
    """Return whether sandboxes, shared memory and parent-death signals can be had."""
    return sys.platform == "linux"


def system_name() -> str:
    """Return system and processor in words, such as `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


def usable_cores() -> int:
    """Return how many cores this process may use; where only Linux knows, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copying_threads() -> int:
    """Return how many threads copy or hash weights: one cannot use a large machine's memory."""
    return max(1, min(MAX_COPYING_THREADS, usable_cores() // 4))


def usable_bytes() -> int:
    allowed = [psutil.virtual_memory().total]
    for file in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # it does not exist, or says "max"
            allowed.append(int(file.read_text()))
    return int(min(allowed))


def return_freed_memory(*, max_arenas: int | None = None) -> None:
    """Have glibc return each freed block of a megabyte at once.

    Otherwise readers of large batches in several threads keep a gigabyte that nobody uses. Fewer
    arenas keep less, but threads wait for each other; set their number before threads start.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        if max_arenas is not None:
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max_arenas)


def raise_open_files_limit() -> int:
    """Allow this process and its children to open more files; return how many, at most.

    The soft limit is 1024 on most systems, for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS has a lower limit, which it does not say
        return soft
    return target


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=uuid,name,memory.total,compute_cap",
    "--format=csv,noheader,nounits",
)
NVIDIA_DEVICES = Path("/dev")
"""Has a file `nvidiaN` for each GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU, as its driver describes it."""

    name: str
    num_bytes: int = 0
    """Its memory; 0: unknown."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None: unknown."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that this process may use, and whether torch can compute on them."""

    visible: tuple[Gpu, ...] = ()
    unusable: str = ""
    """Why torch cannot; empty if it can."""

    @property
    def usable(self) -> tuple[Gpu, ...]:
        return () if self.unusable else self.visible

    def __str__(self) -> str:
        names = [gpu.name for gpu in self.visible]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


@cache
def gpus_here() -> Gpus:
    """Return the GPUs of this machine, without loading torch or a library of the driver."""
    installed = installed_gpus()
    named = {str(index): gpu for index, gpu in enumerate(installed)}
    named |= {gpu.uuid: gpu for gpu in installed}
    names = visible_gpus(os.environ, len(installed), stated=None) if installed else ()
    return Gpus(tuple(named.get(name, installed[0]) for name in names), why_torch_has_no_cuda())


@cache
def installed_gpus() -> tuple[Gpu, ...]:
    try:
        listed = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=False)
        gpus = tuple(map(_gpu_of, listed.stdout.splitlines())) if not listed.returncode else ()
    except (OSError, subprocess.TimeoutExpired, ValueError):
        gpus = ()
    # A container may have the devices without the program.
    files = (file for file in NVIDIA_DEVICES.glob("nvidia*") if file.name[6:].isdecimal())
    return gpus or tuple(Gpu("NVIDIA GPU") for _ in files)


def _gpu_of(line: str) -> Gpu:
    uuid, name, mebibytes, capability = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    num_bytes = int(mebibytes) << 20 if mebibytes.isdecimal() else 0
    return Gpu(name, num_bytes, (int(major), int(minor)), uuid)


def visible_gpus(
    environment: Mapping[str, str], num_found: int, *, stated: int | None
) -> tuple[str, ...]:
    """Return the names of GPUs for `CUDA_VISIBLE_DEVICES`.

    Args:
        environment: of the driver; if it names devices already, only those.
        num_found: how many the machine has.
        stated: the number in the recipe, if there is one.
    """
    named = environment.get(VISIBLE_GPUS)
    if named is not None:  # -1 hides itself and what follows
        listed = takewhile(
            lambda name: name[0] != "-", filter(None, map(str.strip, named.split(",")))
        )
        return tuple(listed)[:stated]
    return tuple(map(str, range(num_found if stated is None else stated)))


def why_torch_has_no_cuda() -> str:
    """Return why the installed torch cannot use any GPU; empty if it was built for one."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        versions = dict(re.findall(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]+)", text, re.MULTILINE))
        if "__version__" in versions and not versions.keys() & {"cuda", "hip"}:
            return f"torch {versions['__version__']} is a build for CPUs: install one for CUDA"
    return ""


ALONE, TOGETHER = fcntl.LOCK_EX, fcntl.LOCK_SH
POLL_S = 0.05


@asynccontextmanager
async def gpu_lock(processes: Path, kind: int) -> AsyncIterator[None]:
    """Hold the lock of the one GPU of a run whose trainer and generators take turns.

    It stands in the folder of a driver's processes. The driver holds it `ALONE` for the trainer's
    turn, so that its death ends the turn. Generators hold it `TOGETHER`, each while it allocates
    memory of the GPU: a new one waits without being told to.
    """
    with (processes / "gpu").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
