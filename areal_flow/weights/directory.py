"""Weights through a shared directory: safetensors files, written aside and renamed into place.

    weights/00000012/{model.safetensors, hash}      published
    weights/.staged-00000013/                       not yet

The driver publishes without ever importing torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from areal_flow.errors import StorageError, WeightsError
from areal_flow.weights.channel import described
from areal_flow.weights.tensor_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
HASH_FILE = "hash"

KEEP_VERSIONS = 4
"""Published versions that stay: the newest, and some for readers that are behind."""


class DirectoryReader:
    """A `WeightsReader` over a directory that trainer, driver and generators see."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def newest(self) -> int:
        versions = self._versions()
        if not versions:
            raise WeightsError(f"no weights were published in {self.root}")
        return versions[-1]

    def load(self, version: int) -> dict[str, Tensor]:
        return self.load_with_hash(version)[0]

    def load_with_hash(self, version: int) -> tuple[dict[str, Tensor], str]:
        """Do as `load`, and return the hash that was found, too."""
        tensors, expected, found = self.read(version)
        if found != expected:
            raise WeightsError(
                f"version {version}: expected weights with hash {expected}, found {found} in "
                f"{self._published(version)}: the files were changed after they were published"
            )
        return tensors, found

    def read(self, version: int) -> tuple[dict[str, Tensor], str, str]:
        """Return published weights, the hash that they were published with, and that of them."""
        from areal_flow.models.hashing import hash_tensors

        directory = self._published(version)
        try:
            expected = (directory / HASH_FILE).read_text()
            tensors = self._tensors(version)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"version {version} cannot be read from {directory}: {error}"
            ) from error
        return tensors, expected, hash_tensors(tensors)

    def _tensors(self, version: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(self._published(version) / MODEL_FILE)
        return tensors

    def _published(self, version: int) -> Path:
        return self.root / f"{version:08d}"

    def _versions(self) -> list[int]:
        return sorted(int(entry.name) for entry in self.root.glob("[0-9]*"))


class DirectoryWriter(DirectoryReader):
    """A `WeightsWriter` over the same directory."""

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        from areal_flow.models.hashing import TensorHash, in_main_memory

        staged, content = self._staged(version), TensorHash()
        try:
            self._prepare(staged)
            with ThreadPoolExecutor(1) as thread:
                hashed = content.add_beside(in_main_memory(tensors), thread=thread)
                self._write(version, hashed, like=described(tensors))
            (staged / HASH_FILE).write_text(content.hexdigest())
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"could not write weights to {staged}: {error}. Free some space or check the "
                "disk, then continue with --resume"
            ) from error
        return content.hexdigest()

    def publish(self, version: int) -> None:
        published, staged = self._published(version), self._staged(version)
        staged_hash = hash_of(staged)
        if staged_hash and staged_hash != hash_of(published):
            shutil.rmtree(published, ignore_errors=True)
            staged.rename(published)
        elif not published.is_dir():
            raise WeightsError(f"version {version} was never staged in {self.root}")
        for old in self._outdated():
            self._retire(self._published(old))
        self._clear_staged(version)

    def _prepare(self, staged: Path) -> None:
        """Make an empty directory; what a replay staged before, on its way, goes."""
        self._clear_staged()
        staged.mkdir(parents=True)

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        """Write all tensors as they come, and keep none: the trainer goes on to change them.

        Args:
            like: tensors of the same names, types and shapes, known beforehand.
        """
        with (self._staged(version) / MODEL_FILE).open("wb") as file:
            write_tensors(tensors, file, like=like)

    def _outdated(self) -> list[int]:
        return self._versions()[:-KEEP_VERSIONS]

    def _retire(self, published: Path) -> None:
        shutil.rmtree(published, ignore_errors=True)

    def _clear_staged(self, last: int | None = None) -> None:
        for staged in self.root.glob(".staged-*"):
            if last is None or staged <= self._staged(last):
                shutil.rmtree(staged, ignore_errors=True)

    def _staged(self, version: int) -> Path:
        return self.root / f".staged-{version:08d}"


def hash_of(directory: Path) -> str | None:
    file = directory / HASH_FILE
    return file.read_text() if file.is_file() else None


def publish_model_directory(source: Path, root: Path, *, version: int = 0) -> None:
    """Publish a model directory's weights as a version, for programs that only generate."""
    from areal_flow.models.policy import load_policy, policy_tensors
    from areal_flow.models.probe import probe_policy

    probe_policy(source)
    writer = DirectoryWriter(root)
    writer.stage(version, policy_tensors(load_policy(source)))
    writer.publish(version)
