"""What every medium promises: what is served is what was published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class WeightsStage(Protocol):
    """The writer's end: all that a trainer needs."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        """Write weights aside, where no reader looks; return their hash."""
        ...


class WeightsChannel(WeightsStage, Protocol):
    """Moves named tensors from one writer to many readers, by policy version."""

    def publish(self, version: int) -> None:
        """Make staged weights the newest, at once and whole; again for the same version is fine.

        Raises:
            WeightsError: nothing was staged.
        """
        ...

    def newest(self) -> int:
        """Return the newest published version.

        Raises:
            WeightsError: nothing was published.
        """
        ...

    def load(self, version: int) -> Mapping[str, Any]:
        """Return published weights, their hash checked.

        Raises:
            WeightsError: they are missing or not what was published.
        """
        ...
