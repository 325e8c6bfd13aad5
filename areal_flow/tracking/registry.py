"""Sinks by the name that recipes use. The next sink is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from areal_flow.config import Recipe, TrackingSettings, load_recipe
from areal_flow.errors import ConfigError, StorageError
from areal_flow.run.directory import check_schema_version, observed_state
from areal_flow.run.layout import RunLayout
from areal_flow.tracking.background import RunTracking
from areal_flow.tracking.fine_tuning import FineTuningProjection
from areal_flow.tracking.mlflow import MlflowTracker
from areal_flow.tracking.projection import Projection
from areal_flow.tracking.protocol import Tracker
from areal_flow.trainer.supervised import OBJECTIVES

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "crashed": "FAILED"}
"""How a run that is not running ended, in the words of sinks."""


TRACKERS: Mapping[str, Callable[[RunLayout, TrackingSettings, str], Tracker]] = {
    "mlflow": MlflowTracker,
}
"""Each makes the sink of a run at an address, which may be empty."""


def make_tracker(layout: RunLayout, settings: TrackingSettings, uri: str) -> Tracker:
    """Return the sink that a recipe names, at an address.

    Raises:
        ConfigError: there is no sink of that name.
    """
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


def start_tracking(layout: RunLayout, recipe: Recipe) -> RunTracking:
    """Return what keeps the recipe's sink up to date, if it wants one, from the first `wake` on.

    Raises:
        ConfigError: there is no sink of that name.
    """
    settings = settings_of(recipe)
    sink = make_tracker(layout, settings, settings.uri) if settings.enabled else None
    return RunTracking(layout, sink)


def untrack(layout: RunLayout, recipe: Recipe) -> int:
    """Remove a run from the recipe's sink, if it has one; return how many versions it had.

    Raises:
        StorageError: the sink cannot be reached.
    """
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
    """Deliver a run to a server, whatever it has of the run; return how many steps it lacked.

    Args:
        uri: of the server or database, which need not be the one that the run was tracked by.

    Raises:
        RunError: there is no run, or one of another schema version.
        StorageError: the server cannot be reached.
    """
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
