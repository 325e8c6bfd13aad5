"""Takes the checkpoints of a run: the log is forced to disk, then the trainer's state is written.

The trainer copies its state between two steps and writes the copy during later steps, one at a
time. Then the log records what a resume from there need not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal_flow.core.errors import TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.run_log import RunLog
from areal_flow.policy.checkpoints import (
    checkpoint_hashes,
    is_recorded,
    list_checkpoints,
    prune_checkpoints,
)
from areal_flow.training.settings import TrainerSettings

logger = logging.getLogger(__name__)

ATTEMPTS_AT_THE_END = 3


class SnapshotTrainer(Protocol):
    """The trainer, as far as checkpoints are concerned."""

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state with these weights, or what a replay made of them, between two steps."""

    async def write_snapshot(self, step: int) -> None:
        """Write the copy as the checkpoint of a step, beside the steps that follow.

        Raises:
            TrainerLost: the trainer died with it.
        """


class CheckpointRegistry(Protocol):
    """Who registers checkpoints as models, and keeps some of them."""

    def wake(self) -> None:
        """Look for new checkpoints. Does not wait."""

    def protected(self) -> Set[Path]:
        """Return the directories of checkpoints that must not be pruned."""


@dataclass
class Checkpoints:
    layout: RunLayout
    settings: TrainerSettings
    log: RunLog
    trainer: SnapshotTrainer
    registry: CheckpointRegistry
    writer: Writer
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] % self.settings.checkpoint_every_steps == 0:
            await self._begin(row)

    async def complete(self) -> None:
        """Return when the ledger's head has its checkpoint, even if trainers are lost."""
        rows = await asyncio.to_thread(self.log.rows, since=self.log.head)
        for _ in range(ATTEMPTS_AT_THE_END):
            await self._begin(rows[-1])
            await self.settle()
            if self._is_written(rows[-1]):
                return
        raise TrainerLost(f"the trainer died {ATTEMPTS_AT_THE_END} times in its last checkpoint")

    async def settle(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def cancel(self) -> None:
        """Give up a checkpoint that is being written: its trainer may be gone for good."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    async def _begin(self, row: dict[str, Any]) -> None:
        await self.settle()
        if not self._is_written(row):
            await self.trainer.take_snapshot(
                weights_hash=row["weights_hash"], next_submission_index=row["next_submission_index"]
            )
        self._writing = asyncio.create_task(self._write(row))

    async def _write(self, row: dict[str, Any]) -> None:
        await asyncio.to_thread(self.log.sync)
        if not self._is_written(row):
            try:
                await self.trainer.write_snapshot(row["step"])
            except TrainerLost as lost:
                logger.warning("%s; the ledger still leads to it", lost)
                return
        await asyncio.to_thread(self.log.settle, row["step"])
        self.registry.wake()
        await asyncio.to_thread(self._prune)

    def _is_written(self, row: dict[str, Any]) -> bool:
        step, hashes = row["step"], checkpoint_hashes(self.layout.checkpoints)
        return step in hashes and is_recorded(step, hashes[step], row, self.layout.forks)

    def _prune(self) -> None:
        root, keep = self.layout.checkpoints, self.settings.keep_checkpoints
        if len(list_checkpoints(root)) > keep + 1:
            prune_checkpoints(root, keep=keep, protected=self.registry.protected())
            self.registry.wake()
        self.log.tokens_needed_after = min(filter(None, list_checkpoints(root)), default=0)
