"""Weights through a shared directory, of which only what has changed crosses the wire.

    weights/00000011/{model.safetensors, hash}      a whole version
    weights/00000012/{delta.safetensors, hash}      what leads to 12 from 11

Of bfloat16 weights a small step changes few. A version is whole where the one before it is not what
this writer staged before, and where the deltas since the last whole one would take more bytes than
it: so a reader that comes late reads two policies' bytes at most. A reader that missed versions
applies their deltas one after the other, and the hash of what comes out is checked.

Writer and reader keep a copy of what they had last. Weights of other types change nearly
everywhere; they are whole, and no copy is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    from areal_flow.weights.delta import TensorDelta

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

    def _write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        from areal_flow.weights.delta import labelled_parts, may_change_little

        last, self._last = self._last, None  # until this version is written
        delta = self._delta(last, version, tensors)
        if delta is None:
            super()._write(version, tensors)
        else:
            save_file(labelled_parts(delta), self._staged(version) / DELTA_FILE)
        if may_change_little(tensors):
            self._last = HeldWeights(version, "", _own_copy(tensors, last, delta))

    def _delta(
        self, last: HeldWeights | None, version: int, tensors: Mapping[str, Tensor]
    ) -> dict[str, TensorDelta] | None:
        """Return what to write instead of all tensors; None where that is not less."""
        from areal_flow.weights.delta import smaller_delta

        if (
            last is None
            or last.version != version - 1
            or last.content_hash != hash_of(self._published(last.version))
        ):
            return None
        earlier = sum(file.stat().st_size for file in self._deltas_up_to(last.version))
        return smaller_delta(last.tensors, tensors, beside_bytes=earlier)

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


def _own_copy(
    tensors: Mapping[str, Tensor],
    last: HeldWeights | None,
    delta: Mapping[str, TensorDelta] | None,
) -> Mapping[str, Tensor]:
    """Return tensors that nobody else changes: the last ones, brought to where these are."""
    from areal_flow.weights.delta import apply_delta

    if last is None or delta is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    apply_delta(last.tensors, delta)
    return last.tensors
