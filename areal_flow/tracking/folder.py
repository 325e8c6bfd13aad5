"""What sinks have in common that are a folder in the run directory, without a registry of models.

Such a folder is written once, in order. That of a driver that died is written again from the
ledger's first row, since nobody knows what of its last step arrived; so is one that has steps which
the ledger lost with the machine's power.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from areal_flow.config import TrackingSettings
from areal_flow.core.layout import RunLayout
from areal_flow.log.ledger import LedgerReader
from areal_flow.tracking.protocol import Tracker

Metrics = Mapping[str, float]


class FolderTracker(Tracker):
    """The half of a `Tracker` that knows what was delivered."""

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
            known = json.loads(self._cursor.read_text())
            if not self._layout.steps.exists() or known[0] <= LedgerReader(self._layout).head:
                self._delivered, self._num_rows, self._evaluations = known
        if not self._num_rows:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._cursor.unlink(missing_ok=True)
        self._folder.mkdir(exist_ok=True)
        self._open()
        self._is_open = True
        return self._delivered

    def log_step(self, step: int, metrics: Metrics, *, timestamp_ms: int) -> None:
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
        known = self._delivered, self._num_rows, self._evaluations
        self._cursor.write_text(json.dumps(known))

    def _open(self) -> None: ...

    def _write(self, axis: str, at: int, metrics: Metrics, moment_s: float) -> None:
        """Write one more row, by `step` or by `policy_version`."""

    def _close(self, status: str) -> None: ...
