"""System calls of Linux that Python's standard library lacks, on x86_64 and aarch64."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Sequence

MACHINES = ("x86_64", "aarch64")
"""Supported machines; each is a column in the tables of system calls."""
MACHINE = platform.machine()
_NUMBERS = {
    "pivot_root": (155, 41), "capset": (126, 91), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
MNT_DETACH = 2
_OPEN_TREE_CLONE, _AT_RECURSIVE, _AT_EMPTY_PATH = 1, 0x8000, 0x1000
_MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD = -100
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
HIGH_DESCRIPTOR = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def column() -> int:
    """Return this machine's column in tables of system calls.

    Raises:
        OSError: the machine is not supported.
    """
    if MACHINE not in MACHINES:
        raise OSError(f"expected one of {', '.join(MACHINES)}, found {MACHINE}")
    return MACHINES.index(MACHINE)


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Make a system call by name; raise its error as `OSError`."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(_NUMBERS[name][column()]), *converted), name)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def prctl(option: int, *arguments: int) -> None:
    converted = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *converted), f"prctl({option})")


def install_filter(program: bytes) -> None:
    """Filter the system calls of this process for good, with a classic BPF program."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    held = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(held))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None)
    _checked(done, f"mount({kind or source} at {target})")


def unmount(target: str) -> None:
    """Detach a mount, even if it is in use."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), "umount2")


def clone_tree(path: str) -> int:
    """Copy the mounts at and below a path; return a descriptor."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return syscall("open_tree", _AT_FDCWD, path.encode(), flags)


def attach_tree(tree: int, target: str) -> None:
    syscall("move_mount", tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)


def set_mount_attributes(target: str, attributes: int, *, below: bool = True) -> None:
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    syscall("mount_setattr", _AT_FDCWD, target.encode(), flags, request, len(request))


def pivot_root_here() -> None:
    """Make the working directory the root, and detach the old root."""
    syscall("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def start_loopback() -> None:
    """Let processes of this network namespace reach each other."""
    request = struct.pack("16sH22x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        fcntl.ioctl(channel, _SIOCSIFFLAGS, request)


def move_high(fd: int) -> int:
    """Move a descriptor to a number above those of a run."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    os.close(fd)
    return high


def set_capabilities(kept: Sequence[int] = ()) -> None:
    """Drop all capabilities except `kept`."""
    words = [0, 0]
    for capability in kept:
        words[capability // 32] |= 1 << capability % 32
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = words
    syscall("capset", header, struct.pack("6I", low, low, 0, high, high, 0))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
