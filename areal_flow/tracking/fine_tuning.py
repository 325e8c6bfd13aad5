"""Fills a sink from a run of supervised fine-tuning alone, which has no ledger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from areal_flow.recovery.checkpoints import checkpoint_hashes, checkpoint_path
from areal_flow.run.inputs import read_inputs
from areal_flow.run.layout import RunLayout
from areal_flow.tracking.description import describe_run
from areal_flow.tracking.protocol import TRAINED_AT_TAG, Tracker
from areal_flow.trainer.supervised import read_metrics

MAX_POINTS = 200
"""So many steps are shown of a long run, evenly spaced, and the last."""


@dataclass(frozen=True, slots=True)
class FineTuningProjection:
    """Delivers what one sink lacks of a run that is over; see `Projection`."""

    layout: RunLayout
    sink: Tracker

    def deliver(self) -> int:
        """Deliver steps, description and checkpoints; return how many steps that was.

        Raises:
            Exception: what the sink raises while it cannot be reached; call again later.
        """
        delivered = self.sink.begin()
        self.sink.describe(describe_run(self.layout))
        rows = read_metrics(self.layout)
        spacing = -(-len(rows) // MAX_POINTS) or 1
        shown = [row for row in rows if row["step"] % spacing == 0 or row is rows[-1]]
        new = [row for row in shown if row["step"] > delivered]
        written = int(self.layout.sft_metrics.stat().st_mtime * 1000) if rows else 0
        for row in new:
            metrics = {f"train/{name}": value for name, value in row.items() if name != "step"}
            self.sink.log_step(int(row["step"]), metrics, timestamp_ms=written)
        self._register()
        return len(new)

    def _register(self) -> None:
        """Register the checkpoints, with the hash of the rows that they were made of."""
        root, layout = self.layout.sft_checkpoints, self.layout
        inputs = read_inputs(layout)
        rows_hash = inputs.files[layout.sft_rows.relative_to(layout.root).as_posix()]
        present = {}
        for step, weights_hash in checkpoint_hashes(root).items():
            path = checkpoint_path(root, step)
            made = datetime.fromtimestamp((path / "state.json").stat().st_mtime, UTC)
            present[path] = {
                "step": str(step),
                "run": layout.name,
                "weights_hash": weights_hash,
                "rows_hash": rows_hash,
                "rows": ", ".join(inputs.sources),
                TRAINED_AT_TAG: made.isoformat(),
            }
        self.sink.register_checkpoints(present)
