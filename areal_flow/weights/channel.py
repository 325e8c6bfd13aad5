"""What every medium promises: what is read is what was published, version by version.

A medium has two ends, made where they are used. A pulled one (a directory, shared memory) keeps
what was published until a reader asks for it; a pushed one (a broadcast) hands it to its readers
when it is published, and `load` returns what has arrived. Neither end sees the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class WeightsWriter(Protocol):
    """The trainer's end. The trainer stages, and the driver publishes once a step is recorded."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        """Keep weights aside, where no reader looks; return their hash.

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


class HashingWriter:
    """A `WeightsWriter` that keeps the hash alone, for ranks and replays that must not write."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        from areal_flow.models.hashing import hash_tensors

        return hash_tensors(tensors)

    def publish(self, version: int) -> None:
        """Do nothing: there is nobody to read."""
