"""The contract of every medium: readers get exactly the versions that were published.

A medium has two ends, made where they are used, and keeps published weights until a reader loads
them. One that pushes, such as NCCL or RDMA, would send them to its readers when they are published,
and `load` would return what has arrived: neither end would see a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from areal_flow.core.errors import WeightsError


class WeightsWriter(Protocol):
    """The trainer's end. The trainer stages, and the driver publishes once a step is recorded."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        """Store weights where no reader looks; return their hash.

        Every writer reads each tensor exactly once, in the order of sorted names, since all ranks
        of a sharded trainer may have to read a tensor together. Shapes and types come from
        `described`. If a read raises, nothing is staged.

        Raises:
            StorageError: there is no room for them.
        """

    def publish(self, version: int) -> None:
        """Make staged weights the newest version, atomically and idempotently.

        Raises:
            WeightsError: nothing was staged.
        """


class WeightsReader(Protocol):
    """The generators' end."""

    def newest(self) -> int:
        """Return the newest published version.

        Raises:
            WeightsError: nothing was published.
        """

    def load(self, version: int) -> Mapping[str, Any]:
        """Return published weights, their hash checked. Any thread.

        Raises:
            WeightsError: they are missing or not what was published.
        """


class StreamedTensors(Mapping[str, Any]):
    """Weights whose tensors are made when they are read: gathered from ranks, or converted."""

    def __init__(self, like: Mapping[str, Any], *, read: Callable[[str], Any]) -> None:
        """`like` has a tensor of the same type and shape for each name; `read` makes one."""
        self.like = like
        self._read = read

    def __getitem__(self, name: str) -> Any:
        expected, tensor = self.like[name], self._read(name)
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            raise WeightsError(
                f"{name}: expected a tensor of the type and shape that were described, "
                f"{expected.dtype} {tuple(expected.shape)}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.like  # `Mapping` itself would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def described(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors of the same names, types and shapes, whose values must not be used."""
    return tensors.like if isinstance(tensors, StreamedTensors) else tensors


class HashingWriter:
    """A `WeightsWriter` that only hashes, for ranks and replays that must not write."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        from areal_flow.policy.models.hashing import hash_tensors

        return hash_tensors(tensors)

    def publish(self, version: int) -> None:
        """Do nothing: nobody reads."""
