"""The store and the tracker as the controller's protocols: blocking calls leave the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_flow.config import Recipe
from areal_flow.errors import StorageError
from areal_flow.layout import RunLayout
from areal_flow.recovery.checkpointing import Checkpoints
from areal_flow.store.ledger import Ledger
from areal_flow.store.maintenance import Maintenance
from areal_flow.store.trajectories import TrajectoryCommitter
from areal_flow.tracking.mlflow import MlflowTracker, NullTracker
from areal_flow.types import GroupReceipt, LogHead
from pipelines.cli.progress import Progress

logger = logging.getLogger(__name__)


class Upkeep:
    """Has a dataset maintained beside its writer, one round at a time."""

    def __init__(self, maintenance: Maintenance) -> None:
        self._maintenance = maintenance
        self._round: asyncio.Task[None] | None = None

    def after_write(self) -> None:
        """Begin a round if one is due and none is running."""
        idle = self._round is None or self._round.done()
        if idle and self._maintenance.is_due:
            self._round = asyncio.create_task(self._maintain())

    async def close(self) -> None:
        """Return when no round is running."""
        if self._round is not None:
            await self._round

    async def _maintain(self) -> None:
        """Run one round; what it could not do the next one will."""
        try:
            await asyncio.to_thread(self._maintenance.run)
        except (OSError, RuntimeError, ValueError, StorageError) as error:
            logger.warning("a dataset could not be compacted, it only grows: %s", error)


class CommittedLog:
    """A `TrajectoryLog` over Lance."""

    def __init__(self, committer: TrajectoryCommitter) -> None:
        self._committer = committer
        self._upkeep = Upkeep(committer.maintenance)

    async def commit(self, receipts: Sequence[GroupReceipt]) -> LogHead:
        head = await asyncio.to_thread(self._committer.commit, receipts)
        self._upkeep.after_write()
        return head

    async def close(self) -> None:
        """Return when nothing is written any more."""
        await self._upkeep.close()


class CommittedLedger:
    """A `StepLedger` over Lance."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._upkeep = Upkeep(ledger.maintenance)

    async def append(self, row: dict[str, Any]) -> None:
        await asyncio.to_thread(self._ledger.append, row)
        self._upkeep.after_write()

    async def close(self) -> None:
        """Return when nothing is written any more."""
        await self._upkeep.close()


class RunObserver:
    """Tells progress and tracker of each step, and has checkpoints written."""

    def __init__(
        self,
        *,
        progress: Progress,
        tracker: MlflowTracker | NullTracker,
        checkpoints: Checkpoints,
    ) -> None:
        self._progress = progress
        self._tracker = tracker
        self._checkpoints = checkpoints

    async def on_step(self, row: dict[str, Any]) -> None:
        self._progress.step(row)
        self._tracker.log_metrics(row["step"], step_metrics(row))
        await self._checkpoints.after_step(row)


_METRICS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/trained_tokens": "num_trained_tokens",
    "train/masked_tokens": "num_masked_tokens",
    "train/step_s": "seconds_step",
    "train/compute_s": "seconds_train",
    "train/wait_s": "seconds_wait",
    "staleness/mean_versions": "staleness_mean",
    "staleness/max_versions": "staleness_max",
    "rollout/reward_mean": "reward_mean",
    "rollout/completion_mean_tokens": "completion_tokens_mean",
    "rollout/generated_tokens": "num_generated_tokens",
    "rollout/discarded_tokens": "num_discarded_tokens",
    "rollout/waiting_tokens": "num_waiting_tokens",
    "rollout/generate_s": "seconds_generate",
    "rollout/failed_members": "num_failed_members",
}


def step_metrics(row: dict[str, Any]) -> dict[str, float]:
    """Return a ledger row's numbers under the names that MLflow shows."""
    of_every_step = {name: float(row[column]) for name, column in _METRICS.items()}
    return of_every_step | {f"train/{name}": value for name, value in row["metrics"].items()}


def make_tracker(recipe: Recipe, layout: RunLayout) -> MlflowTracker | NullTracker:
    """Return the tracker that a recipe asks for."""
    settings = recipe.tracking
    if not settings.enabled:
        return NullTracker()
    return MlflowTracker(
        layout.spool,
        uri=tracking_uri(recipe, layout.root.parent),
        experiment=settings.experiment,
        run_name=layout.name,
        registered_model=settings.registered_model,
    )


def tracking_uri(recipe: Recipe, runs: Path) -> str:
    """Return the server's address, or the database beside the runs."""
    return recipe.tracking.uri or default_tracking_uri(runs)


def default_tracking_uri(runs: Path) -> str:
    """Return the database beside the runs."""
    return f"sqlite:///{(runs / 'mlflow.db').resolve()}"
