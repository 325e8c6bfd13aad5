"""Weights through this machine's shared memory if they fit, else through the run directory.

    weights/00000002 -> /dev/shm/areal-flow-DEVICE-INODE-00000002/00000012/{model.safetensors, hash}

`root` is either a directory of versions, or a link to such a directory in shared memory. The
trainer chooses when it first stages, since it knows the number of bytes.

The link is made before the segments, so a successor can free what a crash has left. The name of the
segments follows from the run directory itself, so a copied run does not lead to them.

Writing to new pages costs twice what writing to old ones does, and three times as much where they
are not mapped yet: the pages of a retired version are reused, and stay mapped. A reader maps a
version and holds a lock on it while any of its tensors is alive; the writer leaves a locked segment
to its readers and takes new pages. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil

from areal_flow.core.errors import ConfigError, StorageError, WeightsError
from areal_flow.policy.checkpoints import MODEL_FILE, read_checkpoint_state, weight_files
from areal_flow.policy.settings import Medium
from areal_flow.policy.weights.channel import described
from areal_flow.policy.weights.directory import (
    HASH_FILE,
    KEEP_VERSIONS,
    DirectoryReader,
    DirectoryWriter,
    HeldWeights,
    num_published_bytes,
    published,
    staged,
)
from areal_flow.policy.weights.tensor_file import MappedPages, map_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")

NUM_COPIES = KEEP_VERSIONS + 2
"""Copies that must fit into shared memory: the versions that stay, the staged one, and one that a
reader still has."""


@dataclass(frozen=True, slots=True)
class LastLoad:
    version: int
    content_hash: str
    transfer_s: float


class ChosenChannel:
    """A `WeightsWriter` and a `WeightsReader` of the medium that `root` has, once it has one."""

    def __init__(self, root: Path, medium: Medium, *, base: Path | None = None) -> None:
        """`base` is the checkpoint with the weights to which the published adapters belong."""
        self.root = root
        self._base, self._is_base_checked = base, False
        self.last_load: LastLoad | None = None
        self._medium = medium
        self._writer: DirectoryWriter | None = None
        self._reader: DirectoryReader | None = None

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        if not (self.root.is_symlink() or self.root.exists()):
            num_bytes = sum(tensor.nbytes for tensor in described(tensors).values())
            if uses_shared_memory(self._medium, num_bytes=num_bytes):
                create_segments(self.root)
        return self._open_writer().stage(version, tensors)

    def publish(self, version: int) -> None:
        self._open_writer().publish(version)

    def num_bytes(self, version: int) -> int:
        """Return the size of a published version; 0 if it is gone."""
        return num_published_bytes(self.root, version)

    def newest(self) -> int:
        return self._open_reader().newest()

    def load(self, version: int) -> Mapping[str, Any]:
        start = perf_counter()
        tensors, content_hash = self._open_reader().load_with_hash(version)
        if self._base:
            tensors = {**self._base_tensors(self._base), **tensors}
        self.last_load = LastLoad(version, content_hash, perf_counter() - start)
        return tensors

    def _base_tensors(self, checkpoint: Path) -> dict[str, Tensor]:
        if not self._is_base_checked:
            from areal_flow.policy.models.hashing import hash_files

            expected = read_checkpoint_state(checkpoint).weights_hash
            if (actual := hash_files(*weight_files(checkpoint))) != expected:
                raise WeightsError(
                    f"{checkpoint}: expected the weights {expected} of its state.json, to which "
                    f"the adapters belong, found {actual}; restore the file from a backup"
                )
            self._is_base_checked = True
        return map_tensors(checkpoint / MODEL_FILE)

    def _open_writer(self) -> DirectoryWriter:
        if self._writer is None:
            in_memory = self.root.is_symlink()
            self._writer = (SharedMemoryWriter if in_memory else DirectoryWriter)(self.root)
        return self._writer

    def _open_reader(self) -> DirectoryReader:
        if not os.path.lexists(self.root):
            return DirectoryReader(self.root)  # raises that nothing was published
        if self._reader is None:
            in_memory = self.root.is_symlink()
            self._reader = (SharedMemoryReader if in_memory else DirectoryReader)(self.root)
        return self._reader


def check_medium(medium: Medium) -> None:
    if medium == "shared_memory" and not available_bytes():
        raise ConfigError(
            f"weights.medium = 'shared_memory': expected free memory in {SHARED_MEMORY}, found "
            "none; set it to 'auto' or 'directory'"
        )


def uses_shared_memory(medium: Medium, *, num_bytes: int) -> bool:
    required, available = NUM_COPIES * num_bytes, available_bytes()
    if medium == "shared_memory" and available < required:
        raise StorageError(
            f"weights.medium = 'shared_memory': expected room for {NUM_COPIES} copies of the "
            f"policy in {SHARED_MEMORY}, {required / 1e9:.3g} GB, found {available / 1e9:.3g} GB: "
            "free some, give the machine (or its container) more, or set it to 'directory'"
        )
    return medium in ("auto", "shared_memory") and available >= required


def available_bytes() -> int:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0
    return min(free, int(psutil.virtual_memory().available))


def segments_of(root: Path) -> Path:
    run = root.parent.stat()
    return SHARED_MEMORY / f"areal-flow-{run.st_dev:x}-{run.st_ino:x}-{root.name}"


def create_segments(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    segments = segments_of(root)
    shutil.rmtree(segments, ignore_errors=True)  # of a directory that was removed by hand
    root.symlink_to(segments)


def free_segments(root: Path) -> None:
    if root.is_symlink():
        shutil.rmtree(segments_of(root), ignore_errors=True)
        root.unlink(missing_ok=True)


class SharedMemoryReader(DirectoryReader):
    """A `WeightsReader` whose tensors are views of the segment that they were published in."""

    def __init__(self, root: Path) -> None:
        super().__init__(segments_of(root))

    def _tensors(self, version: int) -> dict[str, Tensor]:
        return map_tensors(published(self.root, version) / MODEL_FILE)

    def _hold(self, weights: HeldWeights) -> None:
        """Keep nothing: a version that is held would keep its pages."""


class SharedMemoryWriter(DirectoryWriter):
    """A `WeightsWriter` that writes a version into the pages of a retired one."""

    def __init__(self, root: Path) -> None:
        super().__init__(segments_of(root))
        self._pages = MappedPages()

    def _prepare(self, directory: Path) -> None:
        """Make the directory of a version, with the pages of a retired one if there is any."""
        self._make_root()
        for reusable in [*self.root.glob(".staged-*"), *self.root.glob(".spare-*")]:
            if reusable != directory and directory.exists():
                shutil.rmtree(reusable)
            else:
                reusable.rename(directory)
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / HASH_FILE).unlink(missing_ok=True)  # first: from here on it is incomplete

    def _make_root(self) -> None:
        """Make the directory of segments; where it may be, other users can write, too."""
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        status = self.root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StorageError(
                f"{self.root}: expected a directory of user {os.geteuid()}, found a link or one of "
                f"user {status.st_uid}: weights would go there. Have it removed, or set "
                "weights.medium to 'directory'"
            )

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        file = staged(self.root, version) / MODEL_FILE
        try:
            descriptor = _open_locked(file)
        except BlockingIOError:
            file.unlink()  # its readers keep it
            descriptor = _open_locked(file)
        with os.fdopen(descriptor, "wb") as segment:
            write_tensors(tensors, segment, like=like, pages=self._pages)

    def _retire(self, directory: Path) -> None:
        if next(self.root.glob(".spare-*"), None) is None:
            directory.rename(self.root / f".spare-{directory.name}")
        else:
            super()._retire(directory)


def _open_locked(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
