"""Sinks by name, and the threads that deliver a run to them. A new sink is one class and one line
here.

| who        | waits for                          | unblocked by               |
|------------|------------------------------------|----------------------------|
| the driver | nothing                            |                            |
| its thread | its pause, then something new      | a timer, then `wake`       |
| its thread | its pause, while it is unreachable | a timer                    |
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

from areal_flow.config import Recipe, TrackingSettings, load_recipe
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import ConfigError, StorageError
from areal_flow.core.failures import first_line
from areal_flow.core.layout import RunLayout
from areal_flow.core.program import command, how_to_install
from areal_flow.log.directory import check_schema_version, observed_state
from areal_flow.tracking.folder_sinks import TensorboardTracker, WandbTracker
from areal_flow.tracking.mlflow import MlflowTracker
from areal_flow.tracking.projection import FineTuningProjection, Projection
from areal_flow.tracking.protocol import Tracker
from areal_flow.training.supervised import OBJECTIVES

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 5.0
"""The pause after each delivery, or attempt: several steps cost little more than one."""
WARN_EVERY_S = 60.0

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "crashed": "FAILED"}
"""How a run ended, in the terms of sinks."""

TRACKERS: Mapping[str, Callable[[RunLayout, TrackingSettings, str], Tracker]] = {
    "mlflow": MlflowTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}
"""Each makes the sink of a run at an address, which may be empty."""
EXTRAS = ("tensorboard", "wandb")
"""Sinks whose package and extra have their name, and are installed only by choice."""


def require_sinks(settings: TrackingSettings) -> None:
    """Refuse sinks that are unknown, or whose package is not installed."""
    for name in settings.sinks:
        if name not in TRACKERS:
            raise ConfigError(f"tracking.sink = {name!r}: expected one of {list(TRACKERS)}")
        if name in EXTRAS and find_spec(name) is None:
            raise ConfigError(
                f"tracking.sink = {name!r}: expected the package {name}, found none; take it out "
                f"of tracking.sink, or {how_to_install(name)}"
            )


def make_trackers(layout: RunLayout, settings: TrackingSettings, uri: str) -> list[Tracker]:
    return [TRACKERS[name](layout, settings, uri) for name in settings.sinks]


def settings_of(recipe: Recipe) -> TrackingSettings:
    """Return how a recipe is tracked: a reward model is no version of the policies."""
    tracking, objective = recipe.tracking, OBJECTIVES[recipe.sft.objective]
    if not objective.makes_reward_model:
        return tracking
    name = f"{tracking.registered_model}-reward-model"
    return tracking.model_copy(update={"registered_model": name})


class RunTracking:
    """Keeps sinks up to date, each on its own thread; the caller never waits for the network."""

    def __init__(self, layout: RunLayout, *sinks: Tracker) -> None:
        self._layout = layout
        self._sinks = sinks
        self._protected: frozenset[Path] = frozenset()
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            names = json.loads(layout.tracking.read_text())["protected"]
            self._protected = frozenset(layout.checkpoints / name for name in names)
        self._status: str | None = None
        self._wakes = [threading.Event() for _ in sinks]
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(sink, wake), name="tracking", daemon=True)
            for sink, wake in zip(sinks, self._wakes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def model_version(self) -> str | None:
        return next((sink.model_version for sink in self._sinks if sink.model_version), None)

    @property
    def alias(self) -> str | None:
        return next((sink.alias for sink in self._sinks if sink.alias), None)

    def wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    def protected(self) -> frozenset[Path]:
        return self._protected

    def close(self, status: str | None, *, timeout_s: float = 20.0) -> None:
        """Deliver what the time allows and mark the run ended, unless another driver goes on."""
        self._status = status
        self._closing.set()
        self.wake()
        until = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))

    def _run(self, sink: Tracker, wake: threading.Event) -> None:
        projection = Projection(self._layout, sink)
        warned_at = -WARN_EVERY_S
        wake.wait()  # the first delivery may import a client for seconds
        while True:
            wake.clear()
            closing = self._closing.is_set()
            if closing and self._status is None:
                return
            is_unreachable = False
            try:
                projection.deliver()
                self._record(sink.protected())
                if closing and self._status:
                    sink.end(self._status)
            except Exception as error:  # noqa: BLE001  the boundary of the thread
                is_unreachable = True
                if closing or monotonic() - warned_at > WARN_EVERY_S:
                    warned_at = monotonic()
                    self._warn(error)
            if closing:
                return
            self._closing.wait(DELIVER_EVERY_S)
            if not is_unreachable:
                wake.wait()

    def _record(self, protected: frozenset[Path] | None) -> None:
        if protected is not None and protected != self._protected:
            self._protected = protected
            names = sorted(path.name for path in protected)
            with suppress(OSError):  # a full disk must not stop deliveries
                replace_file(self._layout.tracking, json.dumps({"protected": names}))

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "the tracker is unreachable; steps are delivered when it is back, or by %s: %s",
            command("track", self._layout.name, runs=self._layout.root.parent),
            first_line(error),
        )


def start_tracking(layout: RunLayout, recipe: Recipe) -> RunTracking:
    settings = settings_of(recipe)
    if not settings.enabled:
        return RunTracking(layout)
    require_sinks(settings)
    return RunTracking(layout, *make_trackers(layout, settings, settings.uri))


def show_report(layout: RunLayout, recipe: Recipe) -> None:
    """Keep the page of a run where the run is shown."""
    settings = settings_of(recipe)
    for sink in make_trackers(layout, settings, settings.uri) if settings.enabled else ():
        sink.show_report(layout.report)


def untrack(layout: RunLayout, recipe: Recipe) -> int:
    settings = settings_of(recipe)
    if not settings.enabled:
        return 0
    at = settings.uri or "the database beside the runs"
    return sum(
        _call(sink, sink.remove, f"of run {layout.name} at {at}", ". Nothing was removed")
        for sink in make_trackers(layout, settings, settings.uri)
    )


def track(run_directory: Path, uri: str, *, sink: str = "") -> int:
    """Deliver what a run's sinks lack, or those named; return of how many steps that was."""
    layout = RunLayout(run_directory.resolve())
    check_schema_version(layout)
    settings = settings_of(load_recipe(layout.config))
    names = sink or ("mlflow" if uri and uri != settings.uri else settings.sink)
    settings = TrackingSettings.model_validate({**settings.model_dump(), "sink": names, "uri": uri})
    require_sinks(settings)
    return max(
        _call(each, partial(_deliver_all, layout, each), f"at {uri}")
        for each in make_trackers(layout, settings, uri)
    )


def _deliver_all(layout: RunLayout, sink: Tracker) -> int:
    projection = Projection if layout.steps.exists() else FineTuningProjection
    num_steps = projection(layout, sink).deliver()
    if (state := observed_state(layout).state) in STATUS:
        sink.end(STATUS[state])
    if layout.report.is_file():
        sink.show_report(layout.report)
    return num_steps


def _call(sink: Tracker, call: Callable[[], int], where: str, outcome: str = "") -> int:
    """Call a sink; an error while it is unreachable becomes a StorageError."""
    try:
        return call()
    except Exception as error:
        if sink.is_reachable():
            raise
        message = f"expected a tracker {where}, found none: {first_line(error)}{outcome}"
        raise StorageError(message) from error
