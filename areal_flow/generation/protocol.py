"""What every engine promises. `tests/contracts/test_engines.py` holds each implementation to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from areal_flow.types import Completion, EngineStats, GroupRequest

Interruption = Literal["interrupt", "keep", "drain"]
"""What new weights do to running completions: re-prefill and go on; go on with the old keys and
values; or finish on the old weights first."""


class EngineCore(Protocol):
    """An engine driven one decode step at a time, by one thread; see `ThreadedEngine`."""

    version: int
    """The policy version that samples the next token."""

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            EngineError: the request can never fit.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a group, at once; unknown ids are ignored."""
        ...

    def has_work(self) -> bool:
        """Return whether `step` would do anything."""
        ...

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Sample one token for every running completion; return the groups that are complete."""
        ...

    def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        """Serve these weights from the next token on, by the engine's interruption rule."""
        ...


class Engine(Protocol):
    """What a rollout sees."""

    @property
    def version(self) -> int: ...

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """Return one completion a seed, in the seeds' order; cancelling this frees the slots."""
        ...

    async def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        """Return once `version` samples every new token."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
