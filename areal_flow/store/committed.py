"""The two logs as the controller's protocols: blocking calls leave the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from areal_flow.errors import StorageError
from areal_flow.store.ledger import Ledger
from areal_flow.store.maintenance import Maintenance
from areal_flow.store.trajectories import TrajectoryCommitter
from areal_flow.types import GroupReceipt, LogHead

logger = logging.getLogger(__name__)
T = TypeVar("T")


class CommittedLogs:
    """The controller's `Logs` over Lance.

    Writes in a thread, and has each dataset maintained beside that, one round at a time.
    """

    def __init__(self, committer: TrajectoryCommitter, ledger: Ledger) -> None:
        self._committer = committer
        self._ledger = ledger
        self._rounds: dict[Maintenance, asyncio.Task[None]] = {}

    async def commit(self, receipts: Sequence[GroupReceipt]) -> LogHead:
        return await self._write(self._committer.maintenance, self._committer.commit, receipts)

    async def append(self, row: dict[str, Any]) -> None:
        await self._write(self._ledger.maintenance, self._ledger.append, row)

    async def close(self) -> None:
        """Return when nothing is written any more."""
        await asyncio.gather(*self._rounds.values())

    async def _write(self, maintenance: Maintenance, write: Callable[..., T], *arguments: Any) -> T:
        written = await asyncio.to_thread(write, *arguments)
        newest = self._rounds.get(maintenance)
        if maintenance.is_due and (newest is None or newest.done()):
            self._rounds[maintenance] = asyncio.create_task(_maintain(maintenance))
        return written


async def _maintain(maintenance: Maintenance) -> None:
    """Run one round; what it could not do the next one will."""
    try:
        await asyncio.to_thread(maintenance.run)
    except (OSError, RuntimeError, ValueError, StorageError) as error:
        logger.warning("a dataset could not be compacted, it only grows: %s", error)
