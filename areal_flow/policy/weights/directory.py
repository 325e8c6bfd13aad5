"""Weights through a shared directory: files that are written aside and renamed into place.

    weights/00000011/{model.safetensors, hash}      published, in full
    weights/00000012/{delta.safetensors, hash}      published, as the changes since 11
    weights/.staged-00000013/                       not yet published

A small step changes few bfloat16 weights, so a version may be a delta. It is written in full if the
writer did not stage the version before it, or if the deltas since the last full version would
take more bytes, so a late reader reads the bytes of two policies at most. A reader that missed
versions applies their deltas in order, and checks the hash of the result. Writer and reader keep a
copy of their last version. Larger types change nearly everywhere: they are always written in full,
and no copy is kept.

The driver publishes without importing torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError

from areal_flow.core.errors import StorageError, WeightsError
from areal_flow.policy.checkpoints import MODEL_FILE
from areal_flow.policy.weights.channel import described
from areal_flow.policy.weights.tensor_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

DELTA_FILE = "delta.safetensors"
HASH_FILE = "hash"
BYTES_FILE = "num_bytes"
"""Holds the size of all tensors, also if the version is a delta."""

KEEP_VERSIONS = 4
"""Number of published versions to keep, for readers that are behind."""


class HeldWeights(NamedTuple):
    """The last version that a reader or a writer has."""

    version: int
    content_hash: str
    tensors: Mapping[str, Tensor]


class DirectoryReader:
    """A `WeightsReader` over a directory that trainer, driver and generators see."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: HeldWeights | None = None

    def newest(self) -> int:
        if not (versions := published_versions(self.root)):
            raise WeightsError(f"no weights were published in {self.root}")
        return versions[-1]

    def load(self, version: int) -> dict[str, Tensor]:
        return self.load_with_hash(version)[0]

    def load_with_hash(self, version: int) -> tuple[dict[str, Tensor], str]:
        """Return published weights and their hash, which is checked."""
        try:
            tensors, expected, actual = self.read(version)
            if actual != expected:
                raise WeightsError(
                    f"version {version}: expected weights with hash {expected}, found {actual} in "
                    f"{published(self.root, version)}: files were changed after they were published"
                )
        except WeightsError:
            if self._held is None:
                raise
            # The engine changed the tensors that it got, or a fork replaced a version.
            self._held = None
            return self.load_with_hash(version)
        return tensors, actual

    def read(self, version: int) -> tuple[dict[str, Tensor], str, str]:
        """Return published weights, the hash that they were published with, and their own."""
        from areal_flow.policy.models.hashing import hash_tensors

        directory = published(self.root, version)
        try:
            expected = (directory / HASH_FILE).read_text()
            tensors = self._tensors(version)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"version {version} cannot be read from {directory}: {error}"
            ) from error
        actual = hash_tensors(tensors)
        if actual == expected:
            self._hold(HeldWeights(version, actual, tensors))
        return tensors, expected, actual

    def _hold(self, weights: HeldWeights) -> None:
        from areal_flow.policy.weights.delta import is_delta_candidate

        if is_delta_candidate(weights.tensors):
            self._held = weights

    def _tensors(self, version: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        from areal_flow.policy.weights.delta import apply_delta, delta_of_parts

        base = version
        while (
            not (held := self._held_at(base)) and (published(self.root, base) / DELTA_FILE).exists()
        ):
            base -= 1
        if held:
            tensors = {name: tensor.clone() for name, tensor in held.tensors.items()}
        else:
            tensors = load_file(published(self.root, base) / MODEL_FILE)
        for later in range(base + 1, version + 1):
            parts = load_file(published(self.root, later) / DELTA_FILE)
            apply_delta(tensors, delta_of_parts(parts))
        return tensors

    def _held_at(self, version: int) -> HeldWeights | None:
        held = self._held
        if held is None or held.version != version:
            return None
        return held if held.content_hash == hash_of(published(self.root, version)) else None


class DirectoryWriter:
    """A `WeightsWriter` over the same directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._last: HeldWeights | None = None

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        from areal_flow.policy.models.hashing import (
            TensorHash,
            hashing_threads,
            in_main_memory,
        )

        directory, content = staged(self.root, version), TensorHash()
        try:
            self._prepare(directory)
            with hashing_threads() as threads:
                hashed = content.hash_async(in_main_memory(tensors), threads=threads)
                self._write(version, hashed, like=described(tensors))
            num_bytes = sum(tensor.nbytes for tensor in described(tensors).values())
            (directory / BYTES_FILE).write_text(str(num_bytes))
            (directory / HASH_FILE).write_text(content.hexdigest())
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"could not write weights to {directory}: {error}. Free some space or check the "
                "disk, then continue with --resume"
            ) from error
        if self._last:
            self._last = self._last._replace(content_hash=content.hexdigest())
        return content.hexdigest()

    def publish(self, version: int) -> None:
        target, directory = published(self.root, version), staged(self.root, version)
        staged_hash = hash_of(directory)
        if staged_hash and staged_hash != hash_of(target):
            shutil.rmtree(target, ignore_errors=True)
            directory.rename(target)
        elif not target.is_dir():
            raise WeightsError(f"version {version} was never staged in {self.root}")
        versions = published_versions(self.root)
        oldest = versions[-KEEP_VERSIONS:][0]
        base = oldest - sum(1 for _ in self._deltas_up_to(oldest))  # its last full version
        for old in versions:
            if old < base:
                self._retire(published(self.root, old))
        self._clear_staged(version)

    def _prepare(self, directory: Path) -> None:
        """Make an empty directory, and remove versions that a replay has staged before."""
        self._clear_staged()
        directory.mkdir(parents=True)

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        """Write all tensors as they come, since the trainer changes them afterwards."""
        from areal_flow.policy.weights.delta import is_delta_candidate

        last, self._last = self._last, None  # until this version is written
        if not is_delta_candidate(like):
            self._write_full(version, tensors, like=like)
        elif last is not None and self._may_follow(last, version, like):
            self._write_changes(version, tensors, held=last.tensors)
            self._last = HeldWeights(version, "", last.tensors)
        else:
            copies: dict[str, Tensor] = {}

            def copied() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in tensors:
                    copies[name] = tensor.clone()
                    yield name, copies[name]

            self._write_full(version, copied(), like=like)
            self._last = HeldWeights(version, "", copies)

    def _write_full(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        with (staged(self.root, version) / MODEL_FILE).open("wb") as file:
            write_tensors(tensors, file, like=like)

    def _may_follow(self, last: HeldWeights, version: int, like: Mapping[str, Tensor]) -> bool:
        """Return whether readers of the last version can get to this one by a delta."""
        from areal_flow.policy.weights.delta import are_alike

        return (
            last.version == version - 1
            and last.content_hash == hash_of(published(self.root, last.version))
            and are_alike(last.tensors, like)
        )

    def _write_changes(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, held: Mapping[str, Tensor]
    ) -> None:
        """Update the held weights, and write the changes, or all weights if they are smaller."""
        from safetensors.torch import save_file

        from areal_flow.policy.weights.delta import labelled_parts, tensor_delta

        delta = {}
        for name, tensor in tensors:
            delta[name] = tensor_delta(held[name], tensor)
            held[name].copy_(tensor)
        delta_bytes = sum(changes.nbytes for changes in delta.values())
        delta_bytes += sum(file.stat().st_size for file in self._deltas_up_to(version - 1))
        if delta_bytes < sum(tensor.nbytes for tensor in held.values()):
            save_file(labelled_parts(delta), staged(self.root, version) / DELTA_FILE)
        else:
            self._write_full(version, held.items(), like=held)

    def _deltas_up_to(self, version: int) -> Iterator[Path]:
        """Yield the deltas since the last full version, the newest first."""
        while (file := published(self.root, version) / DELTA_FILE).exists():
            yield file
            version -= 1

    def _retire(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def _clear_staged(self, last: int | None = None) -> None:
        for directory in self.root.glob(".staged-*"):
            if last is None or directory <= staged(self.root, last):
                shutil.rmtree(directory, ignore_errors=True)


def published(root: Path, version: int) -> Path:
    return root / f"{version:08d}"


def staged(root: Path, version: int) -> Path:
    return root / f".staged-{version:08d}"


def published_versions(root: Path) -> list[int]:
    return sorted(int(entry.name) for entry in root.glob("[0-9]*"))


def num_published_bytes(root: Path, version: int) -> int:
    """Return the size of a version's tensors; 0 if it is gone."""
    try:
        return int((published(root, version) / BYTES_FILE).read_text())
    except OSError:
        return 0


def hash_of(directory: Path) -> str | None:
    file = directory / HASH_FILE
    return file.read_text() if file.is_file() else None


def publish_model_directory(source: Path, root: Path, *, version: int = 0) -> None:
    """Publish a model directory's weights as a version, for programs that only generate."""
    from areal_flow.policy.models.policy import load_policy, policy_tensors
    from areal_flow.policy.models.probe import probe_policy

    probe_policy(source)
    writer = DirectoryWriter(root)
    writer.stage(version, policy_tensors(load_policy(source)))
    writer.publish(version)
