"""Trajectory ids in, what training needs of them out: how a trainer rank reads the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_flow.store.trajectories import TrajectoryReader


class TrainingRows:
    """Reads trajectories in the order asked for; opens the log on first use."""

    COLUMNS = (
        "submission_index",
        "prompt_tokens",
        "output_tokens",
        "behavior_logprobs",
        "loss_mask",
        "version_spans",
        "reward",
    )

    def __init__(self, trajectories: Path, writers: Path) -> None:
        self._paths = trajectories, writers
        self._reader: TrajectoryReader | None = None

    def __call__(self, trajectory_ids: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        if self._reader is None:
            self._reader = TrajectoryReader(*self._paths)
        rows: list[dict[str, Any]] = self._reader.read(trajectory_ids, self.COLUMNS).to_pylist()
        return rows
