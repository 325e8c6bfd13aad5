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


class _Maintained:
    """Writes in a thread, and has the dataset maintained beside that, one round at a time."""

    def __init__(self, maintenance: Maintenance) -> None:
        self._maintenance = maintenance
        self._round: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Return when nothing is written any more."""
        if self._round is not None:
            await self._round

    async def _write(self, write: Callable[..., T], *arguments: Any) -> T:
        written = await asyncio.to_thread(write, *arguments)
        idle = self._round is None or self._round.done()
        if idle and self._maintenance.is_due:
            self._round = asyncio.create_task(self._maintain())
        return written

    async def _maintain(self) -> None:
        """Run one round; what it could not do the next one will."""
        try:
            await asyncio.to_thread(self._maintenance.run)
        except (OSError, RuntimeError, ValueError, StorageError) as error:
            logger.warning("a dataset could not be compacted, it only grows: %s", error)


class CommittedLog(_Maintained):
    """A `TrajectoryLog` over Lance."""

    def __init__(self, committer: TrajectoryCommitter) -> None:
        super().__init__(committer.maintenance)
        self._commit = committer.commit

    async def commit(self, receipts: Sequence[GroupReceipt]) -> LogHead:
        return await self._write(self._commit, receipts)


class CommittedLedger(_Maintained):
    """A `StepLedger` over Lance."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.maintenance)
        self._append = ledger.append

    async def append(self, row: dict[str, Any]) -> None:
        await self._write(self._append, row)
