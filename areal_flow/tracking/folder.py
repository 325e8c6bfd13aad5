"""What sinks have in common that are a folder of files in the run directory.

Such a folder is written once, in order. The folder of a driver that died is written again from the
ledger's first row: nobody knows what of its last step arrived.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.run.layout import RunLayout
from areal_flow.store.ledger import LedgerReader
from areal_flow.tracking.protocol import RunDescription

Metrics = Mapping[str, float]


class FolderTracker(ABC):
    """A `Tracker` whose sink is a folder, without a registry of models."""

    model_version: str | None = None
    alias: str | None = None

    def __init__(self, layout: RunLayout, settings: TrackingSettings, folder: Path) -> None:
        self._layout = layout
        self._settings = settings
        self._folder = folder
        self._cursor = folder / "delivered.json"
        self._is_open = False
        self._delivered = 0
        self._num_rows = 0
        self._evaluations: dict[str, Metrics] = {}

    def begin(self) -> int:
        if self._is_open:
            return self._delivered
        if self._cursor.is_file():
            known = json.loads(self._cursor.read_text())
            self._delivered, self._num_rows = known["step"], known["rows"]
            self._evaluations = known["evaluations"]
        has_ledger = self._layout.steps.is_dir()
        if has_ledger and self._delivered > LedgerReader(self._layout).head:
            self._cursor.unlink()  # the machine's power failed, and the ledger lost its last rows
        if not self._cursor.is_file():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._delivered, self._num_rows, self._evaluations = 0, 0, {}
        self._folder.mkdir(exist_ok=True)
        self._cursor.unlink(missing_ok=True)
        self._open()
        self._is_open = True
        return self._delivered

    def log_step(self, step: int, metrics: Metrics, *, timestamp_ms: int) -> None:
        if step > self._delivered:
            self._write("step", step, metrics, timestamp_ms / 1000)
            self._num_rows += 1
            self._delivered = step

    def log_evaluation(self, policy_version: int, metrics: Metrics, *, timestamp_ms: int) -> None:
        if self._evaluations.get(str(policy_version)) != metrics:
            self._write("policy_version", policy_version, metrics, timestamp_ms / 1000)
            self._num_rows += 1
            self._evaluations[str(policy_version)] = dict(metrics)

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        del present  # there is no registry

    def protected(self) -> None:
        return None

    def remove(self) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._is_open = False
        return 0

    def is_reachable(self) -> bool:
        return True

    def end(self, status: str) -> None:
        self._close(status)
        self._is_open = False
        known = {"step": self._delivered, "rows": self._num_rows, "evaluations": self._evaluations}
        self._cursor.write_text(json.dumps(known))

    @abstractmethod
    def describe(self, description: RunDescription) -> None: ...

    @abstractmethod
    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, axis: str, at: int, metrics: Metrics, moment_s: float) -> None:
        """Write one row, by `step` or by `policy_version`."""

    @abstractmethod
    def _close(self, status: str) -> None: ...
