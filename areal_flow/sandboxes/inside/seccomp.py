"""The system calls that a program may make: reading, computing, threads.

No new process, no exec, no socket but a private pair, no signal to another process, no change of
file attributes. Commands in a sandbox of their own may do these, too (`_COMMANDS`), but neither
mount, trace, or make namespaces; nor have memory that outlives its mapping (shared without a file,
memfd, System V, attributes of files); nor watch files or change priorities, which other sandboxes
would notice; nor use other sockets than those of Unix and the internet. Any other call fails with
EPERM.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence

from . import kernel

_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59),
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72),
    "epoll_create": (213, -1), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, -1), "eventfd2": (290, 19), "fstat": (5, 80), "stat": (4, -1),
    "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43),
    "fstatfs": (138, 44), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, -1), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "getdents": (78, -1), "getdents64": (217, 61), "mkdir": (83, -1),
    "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35),
    "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "symlink": (88, -1),
    "symlinkat": (266, 36), "ftruncate": (77, 46), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "umask": (95, 166), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "madvise": (28, 233), "msync": (26, 227), "brk": (12, 214),
    "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, -1),
    "alarm": (37, -1), "setitimer": (38, 103), "getitimer": (36, 102), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_delete": (226, 111),
    "timer_getoverrun": (225, 109), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, -1), "times": (100, 153), "futex": (202, 98), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "arch_prctl": (158, -1), "restart_syscall": (219, 128),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getpgrp": (111, -1),
    "getsid": (124, 156), "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165),
    "getpriority": (140, 141), "getcpu": (309, 168), "uname": (63, 160), "sysinfo": (99, 179),
    "getrandom": (318, 278), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip
"""Numbers on x86_64 and aarch64; -1: no such call."""
_COMMANDS = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "setpgid": (109, 154), "setsid": (112, 157), "prctl": (157, 167), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setfsuid": (122, 151), "setfsgid": (123, 152),
    "setgroups": (116, 159), "capget": (125, 90), "ioprio_get": (252, 31),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "creat": (85, -1),
    "truncate": (76, 45), "link": (86, -1), "linkat": (265, 37), "mknod": (133, -1),
    "mknodat": (259, 33), "openat2": (437, 437), "chmod": (90, -1), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55),
    "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13), "fadvise64": (221, 223), "fallocate": (285, 47),
    "readahead": (187, 213), "sync": (162, 81), "syncfs": (306, 267), "sync_file_range": (277, 84),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "signalfd": (282, -1),
    "signalfd4": (289, 74), "mincore": (27, 232), "mlock": (149, 228), "munlock": (150, 229),
    "ioctl": (16, 29), "fcntl": (72, 25), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    "setsockopt": (54, 208),
}  # fmt: skip
_OPEN, _OPENAT = (2, -1), (257, 56)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL = (62, 129), (234, 131)
_IOCTL, _FCNTL, _PRCTL = (16, 29), (72, 25), (157, 167)
_PRLIMIT, _SOCKETPAIR, _SENDTO, _SOCKET = (302, 261), (53, 199), (44, 206), (41, 198)

_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""Flags with which `pthread_create` of glibc and musl calls `clone`; a new process has fewer."""
_IOCTLS = (0x5421, 0x5450, 0x5451, 0x541B, 0x5401, 0x5413)
"""FIONBIO, FIONCLEX, FIOCLEX, FIONREAD, TCGETS, TIOCGWINSZ."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: no owner, no signal."""
_PRCTLS = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""
_MMAP, _MAP_SHARED, _MAP_ANONYMOUS = (9, 222), 0x01, 0x20
_NAMESPACE_FLAGS = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
"""Of `clone`: CLONE_NEWNS, CLONE_NEWCGROUP to CLONE_NEWNET."""
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_OWN_PID = 0x6F776E21
"""Placeholder of a process id (at most 2**22) until it is known."""

_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

Instruction = tuple[int, int, int, int]


def with_own_pid(program: bytes, pid: int) -> bytes:
    """Return a filter that allows signals to one process id only: the process's own."""
    return program.replace(struct.pack("I", _OWN_PID), struct.pack("I", pid))


def filter_program(*, may_truncate: bool = True) -> bytes:
    """Return the filter of a single program, for `with_own_pid`.

    Args:
        may_truncate: false where Landlock is too old to refuse truncation.
    """
    opens = [] if may_truncate else [os.O_TRUNC]
    conditional = {
        _OPEN: _unless_bits(1, opens),
        _OPENAT: _unless_bits(2, opens),
        _CLONE: _if_argument(0, _THREAD_FLAGS),
        _KILL: _if_argument(0, [_OWN_PID]),
        _TGKILL: _if_argument(0, [_OWN_PID]),
        _IOCTL: _if_argument(1, _IOCTLS),
        _FCNTL: _if_argument(1, _FCNTLS),
        _PRCTL: _if_argument(0, _PRCTLS),
        _PRLIMIT: _if_argument(0, [0]),
        _SOCKETPAIR: _if_argument(0, [_AF_UNIX]),
        _SENDTO: _if_null(4),
    }
    return _filter(_ALLOWED, conditional)


def filter_of_commands() -> bytes:
    """Return the filter of commands that have namespaces and a root of their own."""
    families = (_AF_UNIX, _AF_INET, _AF_INET6)
    conditional = {
        _OPEN: [_returns(_ALLOW)],
        _OPENAT: [_returns(_ALLOW)],
        _CLONE: _unless_bits(0, _NAMESPACE_FLAGS),
        _MMAP: _unless_all(3, (_MAP_SHARED, _MAP_ANONYMOUS)),
        _PRLIMIT: _if_argument(0, [0]),
        _SOCKET: _if_argument(0, families),
        _SOCKETPAIR: _if_argument(0, families),
    }
    allowed = {**_ALLOWED, **_COMMANDS}
    return _filter({n: v for n, v in allowed.items() if v not in conditional}, conditional)


def _filter(
    allowed: Mapping[str, tuple[int, int]],
    conditional: Mapping[tuple[int, int], list[Instruction]],
) -> bytes:
    """Return a program of classic BPF."""
    column = kernel.column()
    program = [
        _load(_ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[column]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        _load(_NUMBER_AT),
    ]
    for numbers in allowed.values():
        program += _on(numbers[column], [_returns(_ALLOW)])
    # glibc then calls clone, whose flags a filter can read.
    program += _on(_CLONE3[column], [_returns(_ERRNO | _ENOSYS)])
    for numbers, body in conditional.items():
        program += _on(numbers[column], body)
    program.append(_returns(_ERRNO | _EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _on(number: int, body: list[Instruction]) -> list[Instruction]:
    return [(_EQUAL, 0, len(body), number), *body] if number >= 0 else []


def _if_argument(index: int, values: Sequence[int]) -> list[Instruction]:
    """Allow a call if the lower half of an argument (the kernel reads no more) is in `values`."""
    checks = [step for value in values for step in ((_EQUAL, 0, 1, value), _returns(_ALLOW))]
    return [_load(_ARGUMENTS_AT + 8 * index), *checks, _returns(_ERRNO | _EPERM)]


def _unless_bits(index: int, bits: Sequence[int]) -> list[Instruction]:
    checks = [step for bit in bits for step in ((_ANY_BIT, 0, 1, bit), _returns(_ERRNO | _EPERM))]
    return [_load(_ARGUMENTS_AT + 8 * index), *checks, _returns(_ALLOW)]


def _unless_all(index: int, bits: Sequence[int]) -> list[Instruction]:
    """Allow a call unless an argument has all of these bits."""
    checks = [step for bit in bits for step in ((_ANY_BIT, 1, 0, bit), _returns(_ALLOW))]
    return [_load(_ARGUMENTS_AT + 8 * index), *checks, _returns(_ERRNO | _EPERM)]


def _if_null(index: int) -> list[Instruction]:
    """Allow a call if both halves of an argument are 0."""
    refuse = _returns(_ERRNO | _EPERM)
    low, high = (_load(_ARGUMENTS_AT + 8 * index + half) for half in (0, 4))
    return [low, (_EQUAL, 1, 0, 0), refuse, high, (_EQUAL, 1, 0, 0), refuse, _returns(_ALLOW)]


def _load(offset: int) -> Instruction:
    return _LOAD, 0, 0, offset


def _returns(action: int) -> Instruction:
    return _RETURN, 0, 0, action
