"""Decides which driver may write a run: one process at a time, each with an epoch of its own.

    writers/00000003.lock         a lease: who, since when; locked for as long as the process lives
    writers/00000003.fence.json   where the logs stood when it began beside a process that was alive

A lease is taken by linking a file that is locked already to the next epoch's name: it appears
locked, and only one process can make it appear. The lock of a dead process is free, whatever killed
it. A driver that hangs keeps its lock. Its run can be taken over: before each write it looks for a
newer lease, and ends when there is one.

Between that look and the write a driver can hang, too. So a fence says how long the logs were at
the takeover, and readers pass over what an older epoch wrote beyond it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from areal_flow.core.durable import force_to_disk, replace_file_durably
from areal_flow.core.errors import RunError
from areal_flow.core.program import CODE_VERSION, git_commit


@dataclass(frozen=True, slots=True)
class Lease:
    writer_epoch: int
    pid: int
    host: str
    since: str
    code: str = ""
    """The version of the driver's code."""
    commit: str = ""
    """The commit of that code, if it is a clone's."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@dataclass(frozen=True, slots=True)
class Fence:
    """Where the logs stood when `writer_epoch` took over; older epochs' later rows do not count."""

    writer_epoch: int
    trajectory_watermark: int
    step: int
    evaluation_watermark: int


@dataclass(frozen=True, slots=True)
class Writer:
    """The right to write a run, until somebody takes it over."""

    root: Path
    writer_epoch: int

    @property
    def began_at(self) -> float:
        """When this lease was taken, in seconds since 1970, by the file system's clock."""
        return _lease_path(self.root, self.writer_epoch).stat().st_mtime

    @property
    def is_superseded(self) -> bool:
        return _lease_path(self.root, self.writer_epoch + 1).exists()

    def check_current(self) -> None:
        """Raise a RunError if another driver took over: this one must end and change nothing."""
        if self.is_superseded:
            raise RunError(
                f"this driver (epoch {self.writer_epoch}) hung, and the run was taken over by "
                f"{newest_lease(self.root)}: it ends here and changed nothing since"
            )


@contextmanager
def hold_lease(root: Path, *, take_over: bool = False) -> Iterator[Writer]:
    """Become the one writer until the block or the process ends; RunError if another driver is."""
    root.mkdir(parents=True, exist_ok=True)
    before = newest_lease(root)
    if before and not take_over and is_held(root, before.writer_epoch):
        raise _held_by(before)
    epoch = before.writer_epoch + 1 if before else 1
    descriptor = _link_locked(root, epoch)
    try:
        yield Writer(root, epoch)
    finally:
        os.close(descriptor)


def newest_lease(root: Path) -> Lease | None:
    return next(reversed(leases(root)), None)


def leases(root: Path) -> list[Lease]:
    epochs = sorted(int(path.stem) for path in root.glob("[0-9]*.lock"))
    return [Lease(epoch, **json.loads(_lease_path(root, epoch).read_text())) for epoch in epochs]


def is_held(root: Path, epoch: int) -> bool:
    descriptor = os.open(_lease_path(root, epoch), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_sole_writer(writer: Writer) -> bool:
    return not any(is_held(writer.root, epoch) for epoch in range(1, writer.writer_epoch))


def record_fence(root: Path, fence: Fence) -> None:
    replace_file_durably(root / f"{fence.writer_epoch:08d}.fence.json", json.dumps(asdict(fence)))


def read_fences(root: Path) -> tuple[Fence, ...]:
    paths = sorted(root.glob("[0-9]*.fence.json"))
    return tuple(Fence(**json.loads(path.read_text())) for path in paths)


def _lease_path(root: Path, epoch: int) -> Path:
    return root / f"{epoch:08d}.lock"


def _link_locked(root: Path, epoch: int) -> int:
    partial = root / f".lease-{uuid4().hex}"
    since = datetime.now(UTC).isoformat(timespec="seconds")
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    who |= {"code": CODE_VERSION, "commit": git_commit()}
    partial.write_text(json.dumps(who))
    # NFS locks a file exclusively only where it is open for writing, and together for reading.
    descriptor = os.open(partial, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.fsync(descriptor)
        os.link(partial, _lease_path(root, epoch))
        force_to_disk(root)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, FileExistsError) and (winner := newest_lease(root)):
            raise _held_by(winner) from None
        raise
    finally:
        partial.unlink(missing_ok=True)
    return descriptor


def _held_by(lease: Lease) -> RunError:
    advice = "wait for it, or stop it first"
    if lease.host == socket.gethostname() and _is_stopped(lease.pid):
        advice = f"it is stopped: let it go on with kill -CONT {lease.pid}"
    return RunError(
        f"the run is held by {lease}: {advice}; if it hangs, --take-over goes on without it"
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; unknown where there is no /proc."""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")
    return False
