"""TensorBoard as a sink: event files in the run directory, written without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import time
from typing import Any

from areal_flow.config import TrackingSettings
from areal_flow.core.layout import RunLayout
from areal_flow.tracking.folder import FolderTracker, Metrics
from areal_flow.tracking.protocol import RunDescription


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
