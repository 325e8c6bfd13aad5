"""Weights & Biases as a sink, offline: files in the run directory that `wandb sync` uploads.

Nothing here needs a key or the network. A run that was resumed has a folder for each driver's life
under one id, which `wandb sync` uploads in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import check_schema_version
from areal_flow.tracking.folder import FolderTracker, Metrics
from areal_flow.tracking.protocol import RunDescription

_OPEN: dict[str, Any] = {}
"""W&B's runs of this process by their id, of which it allows one at a time."""
_EXIT_CODES = {"FINISHED": 0, "KILLED": 255}
"""What W&B calls finished and killed; all others are failures."""


class WandbTracker(FolderTracker):
    """A `Tracker` of rows whose x-axes are `step` and, of held-out scores, `policy_version`."""

    def __init__(self, layout: RunLayout, settings: TrackingSettings, uri: str = "") -> None:
        super().__init__(layout, settings, layout.wandb)
        self._run: Any = None
        self._identity = check_schema_version(layout)

    def describe(self, description: RunDescription) -> None:
        prompts = {"prompts_hash": description.prompts.content_hash} if description.prompts else {}
        config = {**description.parameters, **description.tags, **prompts}
        self._run.config.update(config, allow_val_change=True)
        self._run.notes = description.text
        names = ("recipe", "model", "algorithm", "verifier")
        self._run.tags = tuple(description.tags[n][:64] for n in names if n in description.tags)
        Path(self._run.dir, "recipe.toml").write_text(description.recipe)

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        from wandb import Table

        table = Table([*rows[0]], [[*row.values()] for row in rows])
        self._run.log({"samples": table}, step=self._num_rows)
        self._num_rows += 1

    def _open(self) -> None:
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        if left_open := _OPEN.pop(self._identity, None):
            left_open.finish(exit_code=1)
        self._run = _OPEN[self._identity] = wandb.init(
            mode="offline",
            reinit="create_new",
            dir=self._folder,
            id=self._identity,
            name=self._layout.name,
            project=self._settings.experiment,
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("held_out/*", step_metric="policy_version")

    def _write(self, axis: str, at: int, metrics: Metrics, moment_s: float) -> None:
        row = {axis: at, "_timestamp": moment_s, **metrics}
        self._run.log(row, step=self._num_rows, commit=True)
        self._num_rows += 1

    def _close(self, status: str) -> None:
        _OPEN.pop(self._identity, None)
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))
