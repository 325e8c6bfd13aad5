"""The one way back to a recorded step: load a checkpoint, then train the ledger's later rows again.

A resumed run restores its trainer ranks like this, and a replay its rank in this process. What to
do about a step that comes out different is left to the caller, and so is where the trainer runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from areal_flow.errors import TrainerLost, TrainingError
from areal_flow.recovery.comparison import ComparedStep, result_from_row
from areal_flow.recovery.plan import choose_checkpoint, request_from_row
from areal_flow.store.ledger import LedgerReader
from areal_flow.types import PolicyHashes, StepRequest, StepResult

logger = logging.getLogger(__name__)


class RestorableTrainer(Protocol):
    """The trainer ranks as one, in other processes or in this one."""

    async def restore(self, checkpoint: int) -> PolicyHashes:
        """Load the checkpoint of a step.

        Raises:
            TrainerLost: a rank died meanwhile.
            TrainingError: the checkpoint cannot be read.
        """
        ...

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step."""
        ...


class LedgerReplay:
    """A restored trainer on its way through the ledger, row by row."""

    def __init__(
        self,
        trainer: RestorableTrainer,
        rows: Sequence[Mapping[str, Any]],
        restored: PolicyHashes,
        *,
        max_staleness: int,
    ) -> None:
        """Begin at a checkpoint.

        Args:
            rows: the ledger from the checkpoint's own row on.
            restored: what the trainer holds now.
            max_staleness: of the run, in versions.
        """
        self.checkpoint: int = rows[0]["step"]
        self.step: int = self.checkpoint
        self.hashes = restored
        self._trainer = trainer
        self._rows = rows
        self._max_staleness = max_staleness
        self._forked = False

    @property
    def next_row(self) -> Mapping[str, Any]:
        return self._rows[self.step + 1 - self.checkpoint]

    @property
    def next_request(self) -> StepRequest:
        return request_from_row(
            self.next_row,
            parent_hash=self.hashes.weights_hash,
            max_staleness=self._max_staleness,
        )

    async def advance(self) -> ComparedStep:
        """Train the next row again; return the step beside its record.

        Raises:
            TrainerLost: a rank died.
            TrainingError: the step cannot be computed.
        """
        row = self.next_row
        after_fork = self._forked or self.hashes.weights_hash != row["parent_hash"]
        replayed = await self._trainer.step(self.next_request)
        compared = ComparedStep(result_from_row(row), replayed, after_fork=after_fork)
        self.step, self.hashes = replayed.step, replayed.hashes
        self._forked = self._forked or compared.forked
        return compared


async def restore_newest(
    trainer: RestorableTrainer,
    ledger: LedgerReader,
    checkpoints: Mapping[int, str],
    *,
    at_most: int,
    max_staleness: int,
    on_damaged: Callable[[int, TrainingError], None],
) -> LedgerReplay | None:
    """Restore the newest checkpoint that can be read and is what the ledger recorded.

    Args:
        checkpoints: weights hash by step, of those that may be used.
        at_most: the last step whose checkpoint may be used.
        max_staleness: of the run, in versions.
        on_damaged: called with each checkpoint that cannot be read; an older one is tried then.

    Returns:
        The trainer at that checkpoint, or None where no checkpoint is usable.

    Raises:
        TrainerLost: a rank died meanwhile.
    """
    recorded = ledger.rows(["weights_hash"])[: at_most + 1]
    usable = dict(checkpoints)
    while (checkpoint := choose_checkpoint(usable, recorded)) is not None:
        del usable[checkpoint]
        try:
            restored = await trainer.restore(checkpoint)
        except TrainerLost:
            raise
        except TrainingError as error:
            on_damaged(checkpoint, error)
            continue
        rows = ledger.rows(since=checkpoint)
        expected = result_from_row(rows[0]).hashes
        if _agree(restored, expected):
            return LedgerReplay(trainer, rows, restored, max_staleness=max_staleness)
        logger.warning(
            "checkpoint %d was restored to %s, the ledger has %s", checkpoint, restored, expected
        )
    return None


def _agree(restored: PolicyHashes, recorded: PolicyHashes) -> bool:
    """Return whether all hashes that a row recorded were found again; it may lack some."""
    found = asdict(restored)
    return all(found[name] == text for name, text in asdict(recorded).items() if text)
