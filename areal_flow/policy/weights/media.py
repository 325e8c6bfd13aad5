"""Chooses the medium of a driver's life, and stands for either end of it.

The trainer chooses when it stages first: it knows how many bytes there are. The choice stands in
the run directory: `root` is a directory, or a link into shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from areal_flow.core.errors import ConfigError, StorageError
from areal_flow.policy.settings import Medium
from areal_flow.policy.weights.channel import described
from areal_flow.policy.weights.directory import (
    KEEP_VERSIONS,
    DirectoryReader,
    DirectoryWriter,
    num_published_bytes,
)
from areal_flow.policy.weights.shared_memory import (
    SHARED_MEMORY,
    SharedMemoryReader,
    SharedMemoryWriter,
    available_bytes,
    create_segments,
)

NUM_COPIES = KEEP_VERSIONS + 2
"""What must fit into shared memory: the versions that stay, the one that is staged, and one that a
reader still has."""


@dataclass(frozen=True, slots=True)
class LastLoad:
    version: int
    content_hash: str
    transfer_s: float


class ChosenChannel:
    """A `WeightsWriter` and a `WeightsReader` of the medium that `root` has, once it has one."""

    def __init__(self, root: Path, medium: Medium) -> None:
        self.root = root
        self.last_load: LastLoad | None = None
        self._medium = medium
        self._writes: DirectoryWriter | None = None
        self._reads: DirectoryReader | None = None

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        if not (self.root.is_symlink() or self.root.exists()):
            num_bytes = sum(tensor.nbytes for tensor in described(tensors).values())
            if uses_shared_memory(self._medium, num_bytes=num_bytes):
                create_segments(self.root)
        return self._writer().stage(version, tensors)

    def publish(self, version: int) -> None:
        self._writer().publish(version)

    def num_bytes(self, version: int) -> int:
        """Return the size of a published version; 0 if it is gone."""
        return num_published_bytes(self.root, version)

    def newest(self) -> int:
        return self._reader().newest()

    def load(self, version: int) -> Mapping[str, Any]:
        began = perf_counter()
        tensors, content_hash = self._reader().load_with_hash(version)
        self.last_load = LastLoad(version, content_hash, perf_counter() - began)
        return tensors

    def _writer(self) -> DirectoryWriter:
        if self._writes is None:
            make = SharedMemoryWriter if self.root.is_symlink() else DirectoryWriter
            self._writes = make(self.root)
        return self._writes

    def _reader(self) -> DirectoryReader:
        if not os.path.lexists(self.root):
            return DirectoryReader(self.root)  # which has nothing, and says so
        if self._reads is None:
            make = SharedMemoryReader if self.root.is_symlink() else DirectoryReader
            self._reads = make(self.root)
        return self._reads


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
