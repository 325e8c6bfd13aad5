"""Weights through a shared directory, of which only what has changed crosses the wire.

    weights/00000011/{model.safetensors, hash}      a whole version
    weights/00000012/{delta.safetensors, hash}      what leads to 12 from 11

Of bfloat16 weights a small step changes few. A version is whole where the one before it is not what
this writer staged before, and where the deltas since the last whole one would take more bytes than
it: so a reader that comes late reads two policies' bytes at most. A reader that missed versions
applies their deltas one after the other, and the hash of what comes out is checked.

Writer and reader keep a copy of what they had last; the writer's is brought to the next version
tensor by tensor. Weights of other types change nearly everywhere; they are whole, and no copy is
kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_flow.errors import WeightsError
from areal_flow.weights.directory import (
    KEEP_VERSIONS,
    MODEL_FILE,
    DirectoryReader,
    DirectoryWriter,
    hash_of,
)

if TYPE_CHECKING:
    from torch import Tensor

DELTA_FILE = "delta.safetensors"


class HeldWeights(NamedTuple):
    """A version that a reader has."""

    version: int
    content_hash: str
    tensors: Mapping[str, Tensor]


class DeltaReader(DirectoryReader):
    """A `WeightsReader` that applies deltas to what it read before."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._held: HeldWeights | None = None

    def load_with_hash(self, version: int) -> tuple[dict[str, Tensor], str]:
        try:
            return super().load_with_hash(version)
        except WeightsError:
            if self._held is None:
                raise
            self._held = None  # someone changed what was loaded, or a fork took a version's place
            return super().load_with_hash(version)

    def read(self, version: int) -> tuple[dict[str, Tensor], str, str]:
        from areal_flow.weights.delta import may_change_little

        tensors, expected, found = super().read(version)
        if found == expected and may_change_little(tensors):
            self._held = HeldWeights(version, found, tensors)
        return tensors, expected, found

    def _tensors(self, version: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        from areal_flow.weights.delta import apply_delta, delta_of_parts

        held, base = self._held, version
        while not self._holds(base) and (self._published(base) / DELTA_FILE).exists():
            base -= 1
        if held and self._holds(base):
            tensors = {name: tensor.clone() for name, tensor in held.tensors.items()}
        else:
            tensors = load_file(self._published(base) / MODEL_FILE)
        for later in range(base + 1, version + 1):
            parts = load_file(self._published(later) / DELTA_FILE)
            apply_delta(tensors, delta_of_parts(parts))
        return tensors

    def _holds(self, version: int) -> bool:
        held = self._held
        return (
            held is not None
            and held.version == version
            and held.content_hash == hash_of(self._published(version))
        )


class DeltaWriter(DirectoryWriter):
    """A `WeightsWriter` of what has changed since the version that it staged before."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._last: HeldWeights | None = None

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        served_hash = super().stage(version, tensors)
        if self._last:
            self._last = self._last._replace(content_hash=served_hash)
        return served_hash

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, like: Mapping[str, Tensor]
    ) -> None:
        from areal_flow.weights.delta import may_change_little

        last, self._last = self._last, None  # until this version is written
        if not may_change_little(like):
            super()._write(version, tensors, like=like)
        elif last is not None and self._may_follow(last, version, like):
            self._write_changes(version, tensors, held=last.tensors)
            self._last = HeldWeights(version, "", last.tensors)
        else:
            copies: dict[str, Tensor] = {}
            super()._write(version, _copied_into(copies, tensors), like=like)
            self._last = HeldWeights(version, "", copies)

    def _may_follow(self, last: HeldWeights, version: int, like: Mapping[str, Tensor]) -> bool:
        """Return whether readers may get from the last version to this one by a delta."""
        from areal_flow.weights.delta import are_alike

        return (
            last.version == version - 1
            and last.content_hash == hash_of(self._published(last.version))
            and are_alike(last.tensors, like)
        )

    def _write_changes(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, held: Mapping[str, Tensor]
    ) -> None:
        """Bring what is held to this version, and write a delta, or everything if that is less."""
        from safetensors.torch import save_file

        from areal_flow.weights.delta import is_smaller, labelled_parts, tensor_delta

        delta = {}
        for name, tensor in tensors:
            delta[name] = tensor_delta(held[name], tensor)
            held[name].copy_(tensor)
        earlier = sum(file.stat().st_size for file in self._deltas_up_to(version - 1))
        if is_smaller(delta, held, beside_bytes=earlier):
            save_file(labelled_parts(delta), self._staged(version) / DELTA_FILE)
        else:
            super()._write(version, held.items(), like=held)

    def _deltas_up_to(self, version: int) -> Iterator[Path]:
        """Yield the deltas since the last whole version, the newest first."""
        while (file := self._published(version) / DELTA_FILE).exists():
            yield file
            version -= 1

    def _outdated(self) -> list[int]:
        """Return all before the whole version that the oldest one to keep follows from."""
        versions = self._versions()
        oldest = versions[-KEEP_VERSIONS:][0]
        first = oldest - sum(1 for _ in self._deltas_up_to(oldest))
        return [version for version in versions if version < first]


def _copied_into(
    copies: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor, which nobody else changes, once it is among the copies."""
    for name, tensor in tensors:
        copies[name] = tensor.clone()
        yield name, copies[name]
