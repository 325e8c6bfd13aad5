"""What a user calls a model in, its directory out: a run, a registry reference, or a path."""

from __future__ import annotations

from pathlib import Path

from areal_flow.errors import ModelError
from areal_flow.layout import RunLayout, run_layout
from areal_flow.recovery.checkpoints import checkpoint_path, list_checkpoints
from areal_flow.tracking.mlflow import model_source
from areal_flow.tracking.registry import default_tracking_uri


def find_model(runs: Path, reference: str, *, registry: str | None = None) -> Path:
    """Return the directory of a checkpoint or a model.

    Args:
        reference: a run's name (its newest checkpoint), `models:/NAME@ALIAS`, or a directory.
        registry: MLflow's address, if it is not the database beside the runs.

    Raises:
        ModelError: there is nothing of that name.
    """
    if reference.startswith("models:/"):
        directory = model_source(registry or default_tracking_uri(runs), reference)
        if not directory.is_dir():
            raise ModelError(f"{reference} points to {directory}, which is gone")
        return directory
    if (Path(reference) / "config.json").is_file():
        return Path(reference).resolve()
    if "/" not in reference and (runs / reference / "config.toml").is_file():
        return newest_checkpoint(run_layout(runs, reference))
    raise ModelError(
        f"expected a run in {runs}, models:/NAME@ALIAS or a model directory, found {reference!r}"
    )


def newest_checkpoint(layout: RunLayout) -> Path:
    """Return a run's newest checkpoint.

    Raises:
        ModelError: it has none.
    """
    found = list_checkpoints(layout.checkpoints)
    if not found:
        raise ModelError(f"run {layout.name} has no checkpoint yet")
    return checkpoint_path(layout.checkpoints, found[-1])


def run_of_checkpoint(directory: Path) -> RunLayout | None:
    """Return the run that a checkpoint lies in, if it lies in one."""
    root = directory.parent.parent
    return RunLayout(root) if (root / "config.toml").is_file() else None
