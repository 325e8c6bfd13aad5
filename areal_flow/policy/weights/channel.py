"""What every medium promises: what is read is what was published, version by version.

A medium has two ends, made where they are used. It keeps what was published until a reader asks for
it. One that pushes, such as NCCL or RDMA, would hand it to its readers when it is published, and
`load` would return what has arrived: neither end would see the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from areal_flow.core.errors import WeightsError


class WeightsWriter(Protocol):
    """The trainer's end. The trainer stages, and the driver publishes once a step is recorded."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        """Keep weights aside, where no reader looks; return their hash.

        Every writer reads each tensor exactly once, in the order of sorted names: all ranks of a
        sharded trainer may have to read a tensor together. What it has to know beforehand it
        takes from `described`. If a read raises, nothing is staged.

        Raises:
            StorageError: there is no room for them.
        """

    def publish(self, version: int) -> None:
        """Make staged weights the newest, at once and whole; again for the same version is fine.

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
    """Weights of which each tensor is made when it is read: gathered from ranks, or converted."""

    def __init__(self, like: Mapping[str, Any], *, read: Callable[[str], Any]) -> None:
        """Take what is known of the tensors, and what makes one of them."""
        self.like = like
        self._read = read

    def __getitem__(self, name: str) -> Any:
        expected, tensor = self.like[name], self._read(name)
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            raise WeightsError(
                f"{name}: expected a tensor like the one it was described by, "
                f"{expected.dtype} {tuple(expected.shape)}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.like  # the mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def described(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors of the same names, types, shapes and sizes without reading any of these.

    Their values are not to be used.
    """
    return tensors.like if isinstance(tensors, StreamedTensors) else tensors


def converted(tensors: Mapping[str, Any], *, dtype: Any) -> StreamedTensors:
    """Return tensors of another of torch's types, each of which is converted when it is read."""
    import torch

    like = {
        name: torch.empty(tensor.shape, dtype=dtype, device="meta")
        for name, tensor in described(tensors).items()
    }
    return StreamedTensors(like, read=lambda name: tensors[name].to(dtype))


class HashingWriter:
    """A `WeightsWriter` that keeps the hash alone, for ranks and replays that must not write."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        from areal_flow.policy.models.hashing import hash_tensors

        return hash_tensors(tensors)

    def publish(self, version: int) -> None:
        """Do nothing: there is nobody to read."""
