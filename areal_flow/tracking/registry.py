"""Sinks by the name that recipes use, and what delivers a run to one. The next sink is one file and
one line here.

| who        | waits for                          | unblocked by               |
|------------|------------------------------------|----------------------------|
| the driver | nothing                            |                            |
| the thread | its pause, then something new      | a timer, then `wake`       |
| the thread | its pause, while its sink is away  | a timer                    |
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

from areal_flow.command import command
from areal_flow.config import Recipe, TrackingSettings, load_recipe
from areal_flow.errors import ConfigError, StorageError
from areal_flow.run.directory import check_schema_version, observed_state
from areal_flow.run.durable import replace_file
from areal_flow.run.layout import RunLayout
from areal_flow.tracking.mlflow import MlflowTracker
from areal_flow.tracking.projection import FineTuningProjection, Projection
from areal_flow.tracking.protocol import Tracker
from areal_flow.trainer.supervised import OBJECTIVES

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 5.0
"""The pause after each delivery, or attempt: several steps cost little more than one."""
COMPLAIN_EVERY_S = 60.0

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "crashed": "FAILED"}
"""How a run that is not running ended, in the words of sinks."""

TRACKERS: Mapping[str, Callable[[RunLayout, TrackingSettings, str], Tracker]] = {
    "mlflow": MlflowTracker,
}
"""Each makes the sink of a run at an address, which may be empty."""


def make_tracker(layout: RunLayout, settings: TrackingSettings, uri: str) -> Tracker:
    if settings.sink not in TRACKERS:
        raise ConfigError(f"tracking.sink = {settings.sink!r}: expected one of {list(TRACKERS)}")
    return TRACKERS[settings.sink](layout, settings, uri)


def settings_of(recipe: Recipe) -> TrackingSettings:
    """Return how a recipe is tracked: a reward model is no version of the policies."""
    tracking, made = recipe.tracking, OBJECTIVES[recipe.sft.objective]
    if not made.makes_reward_model:
        return tracking
    name = f"{tracking.registered_model}-reward-model"
    return tracking.model_copy(update={"registered_model": name})


class RunTracking:
    """Keeps a sink up to date on its own thread; the caller never waits for the network."""

    def __init__(self, layout: RunLayout, sink: Tracker | None) -> None:
        self._layout = layout
        self._sink = sink
        self._protected: frozenset[Path] = frozenset()
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            names = json.loads(layout.tracking.read_text())["protected"]
            self._protected = frozenset(layout.checkpoints / name for name in names)
        self._status: str | None = None
        self._complained_at = -COMPLAIN_EVERY_S
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if sink is not None:
            self._thread = threading.Thread(
                target=self._run, args=(sink,), name="tracking", daemon=True
            )
            self._thread.start()

    @property
    def model_version(self) -> str | None:
        return self._sink.model_version if self._sink else None

    @property
    def alias(self) -> str | None:
        return self._sink.alias if self._sink else None

    def wake(self) -> None:
        self._wake.set()

    def protected(self) -> frozenset[Path]:
        return self._protected

    def close(self, status: str | None, *, timeout_s: float = 20.0) -> None:
        """Deliver what the time allows and mark the run ended, unless another driver goes on."""
        self._status = status
        self._closing.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout_s)

    def _run(self, sink: Tracker) -> None:
        projection = Projection(self._layout, sink)
        self._wake.wait()  # the first delivery may import a client for seconds
        while True:
            self._wake.clear()
            closing = self._closing.is_set()
            if closing and self._status is None:
                return
            is_away = False
            try:
                projection.deliver()
                self._record(sink.protected())
                if closing and self._status:
                    sink.end(self._status)
            except Exception as error:  # noqa: BLE001  the thread's border
                is_away = True
                self._complain(error, at_once=closing)
            if closing:
                return
            self._closing.wait(DELIVER_EVERY_S)
            if not is_away:
                self._wake.wait()

    def _record(self, protected: frozenset[Path]) -> None:
        if protected != self._protected:
            self._protected = protected
            names = sorted(path.name for path in protected)
            with suppress(OSError):  # a full disk stops no delivery
                replace_file(self._layout.tracking, json.dumps({"protected": names}))

    def _complain(self, error: Exception, *, at_once: bool) -> None:
        if at_once or monotonic() - self._complained_at > COMPLAIN_EVERY_S:
            logger.warning(
                "the tracker is away; what it lacks is delivered when it is back, or by %s: %s",
                command("track", self._layout.name, runs=self._layout.root.parent),
                error,
            )
            self._complained_at = monotonic()


def start_tracking(layout: RunLayout, recipe: Recipe) -> RunTracking:
    settings = settings_of(recipe)
    sink = make_tracker(layout, settings, settings.uri) if settings.enabled else None
    return RunTracking(layout, sink)


def untrack(layout: RunLayout, recipe: Recipe) -> int:
    settings = settings_of(recipe)
    if not settings.enabled:
        return 0
    sink = make_tracker(layout, settings, settings.uri)
    try:
        return sink.remove()
    except Exception as error:
        if sink.is_reachable():
            raise
        at = settings.uri or "the database beside the runs"
        raise StorageError(
            f"expected the tracker of run {layout.name} at {at}, found none: {error}. Nothing was "
            "removed"
        ) from error


def track(run_directory: Path, uri: str) -> int:
    layout = RunLayout(run_directory.resolve())
    check_schema_version(layout)
    sink = make_tracker(layout, settings_of(load_recipe(layout.config)), uri)
    try:
        of_run = Projection if layout.steps.exists() else FineTuningProjection
        num_steps = of_run(layout, sink).deliver()
        if (state := observed_state(layout).state) in STATUS:
            sink.end(STATUS[state])
    except Exception as error:
        if sink.is_reachable():
            raise
        raise StorageError(f"expected a tracker at {uri}, found none: {error}") from error
    return num_steps
