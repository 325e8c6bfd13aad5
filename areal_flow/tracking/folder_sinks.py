"""Sinks that are a folder in the run directory, without a model registry: TensorBoard and W&B.

Such a folder is written once, in order. That of a driver that died is written again from the
ledger's first row, since it may lack a part of the last step; so is one with steps that the ledger
lost in a power failure. Nothing here needs torch, a key or the network: `wandb sync` uploads a
folder, and a resumed run has one for each driver's life, all under one id.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import check_schema_version
from areal_flow.log.ledger import LedgerReader
from areal_flow.tracking.protocol import RunDescription, StepMetrics, Tracker

Metrics = Mapping[str, float]


class FolderTracker(Tracker):
    """Tracks what was delivered; subclasses write it."""

    model_version = alias = None
    _delivered, _num_rows = 0, 0
    _is_open = False

    def __init__(self, layout: RunLayout, settings: TrackingSettings, folder: Path) -> None:
        self._layout = layout
        self._settings = settings
        self._folder = folder
        self._cursor = folder / "delivered.json"
        self._evaluations: dict[str, Metrics] = {}

    def begin(self) -> int:
        if self._is_open:
            return self._delivered
        with suppress(FileNotFoundError, ValueError):  # a machine that lost power leaves it empty
            delivered = json.loads(self._cursor.read_text())
            if not self._layout.steps.exists() or delivered[0] <= LedgerReader(self._layout).head:
                self._delivered, self._num_rows, self._evaluations = delivered
        if not self._num_rows:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._cursor.unlink(missing_ok=True)
        self._folder.mkdir(exist_ok=True)
        self._open()
        self._is_open = True
        return self._delivered

    def log_steps(self, steps: Sequence[StepMetrics]) -> None:
        for step, metrics, timestamp_ms in steps:
            if step > self._delivered:
                self._write("step", step, metrics, timestamp_ms / 1000)
                self._delivered = step

    def log_evaluation(self, policy_version: int, metrics: Metrics, *, timestamp_ms: int) -> None:
        if self._evaluations.get(str(policy_version)) != metrics:
            self._write("policy_version", policy_version, metrics, timestamp_ms / 1000)
            self._evaluations[str(policy_version)] = metrics

    def remove(self) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._is_open = False
        return 0

    def is_reachable(self) -> bool:
        return True

    def end(self, status: str) -> None:
        self._close(status)
        self._is_open = False
        delivered = self._delivered, self._num_rows, self._evaluations
        self._cursor.write_text(json.dumps(delivered))

    def _open(self) -> None: ...

    def _write(self, axis: str, at: int, metrics: Metrics, moment_s: float) -> None:
        """Write one more row, by `step` or by `policy_version`."""

    def _close(self, status: str) -> None: ...


class TensorboardTracker(FolderTracker):
    """A `Tracker` that `tensorboard --logdir RUNS` shows."""

    def __init__(self, layout: RunLayout, settings: TrackingSettings, uri: str = "") -> None:
        super().__init__(layout, settings, layout.tensorboard)

    def describe(self, description: RunDescription) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {
            name: value if isinstance(value, int | float | bool | str) else str(value)
            for name, value in description.parameters.items()
        }
        self._add(0, hparams_pb(plain, trial_id=self._layout.name), time())
        prompts = {"prompts": description.prompts.content_hash} if description.prompts else {}
        about = {**description.tags, **prompts}.items()
        rows = [{"": name, "value": value} for name, value in about]
        self._write_text("run", f"{description.text}\n\n{_table(rows)}")
        self._write_text("status", "RUNNING")
        self._write_text("recipe", "".join(f"    {x}\n" for x in description.recipe.splitlines()))

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write_text("held_out/samples", _table(rows))

    def _open(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder))

    def _write(self, axis: str, at: int, metrics: Metrics, moment_s: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._add(at, Summary(value=values), moment_s)
        self._num_rows += 1

    def _close(self, status: str) -> None:
        self._write_text("status", status)
        self._writer.close()

    def _write_text(self, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(self._delivered, text_pb(tag, text), time())

    def _add(self, step: int, summary: Any, moment_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=moment_s, step=step, summary=summary))
        self._writer.flush()


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown; line breaks and bars in a text do not end its cell."""

    def line(cells: Iterable[Any]) -> str:
        shown = (str(cell).replace("|", "&#124;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(shown)} |"

    ruled = [line(rows[0]), line(["---"] * len(rows[0]))]
    return "\n".join([*ruled, *(line(row.values()) for row in rows)])


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
