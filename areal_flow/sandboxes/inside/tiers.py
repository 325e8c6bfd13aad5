"""The two tiers: what a run can see of files and other processes.

`namespaces`: a tree of read-only files and no more, and for each run namespaces of its own. A
zygote lives in a user namespace whose only user is the ordinary one that it was started by, or
nobody if that was root. It is the first process of a pid namespace, whose end is the end of all.

`landlock`, where there are no user namespaces: a few places that can be read. Landlock hides the
content of all other files, but neither their names nor their sizes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from . import kernel

NAMESPACES, LANDLOCK = "namespaces", "landlock"

SCRATCH = "/tmp"
SCRATCH_BYTES = 16 * 2**20
_SCRATCH_OPTIONS = f"size={SCRATCH_BYTES},nr_inodes=1k,mode=0777"
WORK = "/home/agent"
"""Home and first working directory of commands."""
USER = "agent"
PROC = "/proc"
"""A zygote of commands has the machine's, without which the kernel mounts none for a sandbox."""
FOLDERS = {
    "/": 0o755, WORK: 0o755, "/tmp": 0o1777, "/var/tmp": 0o1777, "/run": 0o755, "/dev/shm": 0o1777,
}  # fmt: skip
"""What commands may write first, with modes."""
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
          "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2"}  # fmt: skip
_NOBODY = 65534
_OWN = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)  # fmt: skip

_READ_FILE, _READ_DIRECTORY, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""File rights, by the version of Landlock that introduced them."""
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11
"""Binding and connecting TCP, since version 4; abstract sockets and signals, since 6."""
_TRUNCATE_SINCE = 3


@dataclass(frozen=True)
class Namespaces:
    """What a zygote needs to confine a run, opened before its own confinement."""

    own_pids: int
    proc: int
    uid: int
    gid: int
    readable: tuple[str, ...]
    devices: tuple[str, ...]

    def prepare_fork(self) -> None:
        """Make the next fork the first process of a new pid namespace."""
        kernel.setns(self.own_pids, kernel.CLONE_NEWPID)
        kernel.unshare(kernel.CLONE_NEWPID)

    def confine(self) -> None:
        """Separate this process from other runs, except for the shared read-only files."""
        kernel.unshare(_OWN | kernel.CLONE_NEWCGROUP)
        _write_maps(self.proc, "self", self.uid, self.gid)
        os.close(self.proc)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("none", SCRATCH, "tmpfs", flags, _SCRATCH_OPTIONS)
        os.chdir(SCRATCH)
        kernel.set_capabilities()

    def confine_commands(self, *, disk_bytes: int) -> None:
        """Separate this process from other sandboxes, in a root that commands may write.

        The root is in memory. It has the places of the zygote, read-only, and what belongs to this
        pid namespace in /proc, if the kernel allows that: not where the machine hides a part of it.
        Neither programs nor what loads them can be replaced: links of the machine are mounts here,
        folders above a mount are mounts, which cannot be renamed, and /etc is read-only.
        """
        kernel.unshare(kernel.CLONE_NEWNS)
        places = {*self.readable, *self.devices} - {PROC, "/dev/zero"}  # whose memory is no one's
        trees = {path: kernel.clone_tree(path) for path in places}
        options = f"size={disk_bytes},nr_inodes={max(1024, disk_bytes >> 13)},mode=0755"
        kernel.mount("none", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.mkdir(SCRATCH + PROC)
        with suppress(OSError):
            flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
            kernel.mount("proc", SCRATCH + PROC, "proc", flags)
        above = {str(folder) for path in places for folder in PurePosixPath(path).parents} - {"/"}
        for folder in sorted(above):
            os.makedirs(SCRATCH + folder, exist_ok=True)
            _bind(SCRATCH + folder)
        _attach(SCRATCH, trees, self.devices)
        self._furnish(SCRATCH)
        _bind(SCRATCH + "/etc", kernel.MOUNT_ATTR_RDONLY)
        os.chdir(SCRATCH)
        kernel.pivot_root_here()
        kernel.unshare(_OWN & ~kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP)
        _write_maps(self.proc, "self", self.uid, self.gid)
        os.close(self.proc)
        kernel.start_loopback()
        os.chdir(WORK)
        kernel.set_capabilities()

    def _furnish(self, root: str) -> None:
        """Make the folders, links and files that commands expect."""
        for path, mode in FOLDERS.items():
            os.makedirs(root + path, exist_ok=True)
            os.chmod(root + path, mode)
        for path, target in _LINKS.items():
            os.symlink(target, root + path)
        os.makedirs(root + "/etc", exist_ok=True)
        files = {
            "passwd": f"{USER}:x:{self.uid}:{self.gid}::{WORK}:/bin/bash\n",
            "group": f"{USER}:x:{self.gid}:\n",
            "hosts": "127.0.0.1 localhost\n",
        }
        for name, text in files.items():
            with open(f"{root}/etc/{name}", "w") as file:
                file.write(text)


def enter(readable: Sequence[str], devices: Sequence[str]) -> Namespaces:
    """Continue as a confined child of this process, which waits for it and ends as it ended.

    Raises:
        OSError: the kernel does not let this user have namespaces.
    """
    uid, gid = os.getuid(), os.getgid()
    proc = kernel.move_high(os.open("/proc", os.O_PATH | os.O_DIRECTORY))
    if uid == 0:
        uid = gid = _NOBODY
        os.setgroups([])
        with _maps_by_root(proc, uid, gid):
            kernel.unshare(_OWN | kernel.CLONE_NEWPID)
    else:
        kernel.unshare(_OWN | kernel.CLONE_NEWPID)
        _write_maps(proc, "self", uid, gid)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    trees = {path: _tree_of(path) for path in (*readable, *devices)}
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(
        kernel.PR_SET_DUMPABLE, 1
    )  # else root owns /proc/self, and no child can write its maps
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    own_pids = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    _make_root(trees, devices)
    return Namespaces(own_pids, proc, uid, gid, tuple(readable), tuple(devices))


@contextmanager
def _maps_by_root(proc: int, uid: int, gid: int) -> Iterator[None]:
    """Map this process to an ordinary user in the namespace that the block makes.

    A helper process, which stays root, writes the maps.
    """
    reader, writer = os.pipe()
    owner = str(os.getpid())
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        code = 1
        with suppress(OSError):
            if os.read(reader, 1):
                _write_maps(proc, owner, uid, gid)
                code = 0
        os._exit(code)
    os.close(reader)
    try:
        yield
        os.write(writer, b"!")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the ids of a user namespace cannot be mapped")


def _write_maps(proc: int, pid: str, uid: int, gid: int) -> None:
    """Map one user and one group, with the same ids as outside, into a process's namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                       ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
        file = os.open(f"{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _tree_of(path: str) -> int | str:
    """Return the mounts at a path, or the target of a symbolic link."""
    return os.readlink(path) if os.path.islink(path) else kernel.clone_tree(path)


def _make_root(trees: dict[str, int | str], devices: Sequence[str]) -> None:
    """Make a root of these places alone, in which only the devices can be written."""
    root = "/tmp"
    kernel.mount("none", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    os.mkdir(root + SCRATCH)
    _attach(root, trees, devices)
    kernel.set_mount_attributes(root, kernel.MOUNT_ATTR_RDONLY, below=False)
    os.chdir(root)
    kernel.pivot_root_here()


def _attach(root: str, trees: Mapping[str, int | str], devices: Sequence[str]) -> None:
    """Attach places below a root; only devices can be written there."""
    for path, tree in trees.items():
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(tree, str):
            os.symlink(tree, target)
            continue
        if os.path.isdir(f"/proc/self/fd/{tree}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        kernel.attach_tree(tree, target)
        is_device = path in devices
        attributes = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID
        kernel.set_mount_attributes(
            target, attributes | (0 if is_device else kernel.MOUNT_ATTR_NODEV)
        )
        os.close(tree)


def _bind(folder: str, attributes: int = 0) -> None:
    """Make a folder a mount of itself."""
    tree = kernel.clone_tree(folder)
    kernel.attach_tree(tree, folder)
    os.close(tree)
    if attributes:
        kernel.set_mount_attributes(folder, attributes, below=False)


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 without Landlock."""
    try:
        return kernel.syscall("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def refuses_truncation() -> bool:
    """Return whether this Landlock holds `open(path, O_TRUNC)` to its rules."""
    return landlock_version() >= _TRUNCATE_SINCE


def make_ruleset(readable: Iterable[str], devices: Iterable[str]) -> int:
    """Return a descriptor of rules: places that may be read, devices that may also be written.

    Raises:
        OSError: there is no Landlock.
    """
    version = landlock_version()
    handled = sum(rights for since, rights in _FILE_RIGHTS.items() if since <= version)
    network = _NETWORK_RIGHTS if version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.move_high(kernel.syscall("landlock_create_ruleset", attributes, size, 0))
    for path in readable:
        is_folder = os.path.isdir(path)
        _allow(ruleset, path, _READ_FILE | (_READ_DIRECTORY if is_folder else 0))
    for path in devices:
        _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
    return ruleset


def restrict(ruleset: int) -> None:
    """Restrict this process to the rules for good; needs `no_new_privs`."""
    kernel.syscall("landlock_restrict_self", ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        request = struct.pack("=Qi", rights, fd)
        kernel.syscall("landlock_add_rule", ruleset, 1, request, 0)
    finally:
        os.close(fd)
