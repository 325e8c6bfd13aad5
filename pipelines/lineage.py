"""A model version or a run in, what it was made from out, and whether recorded hashes agree."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.errors import ModelError
from areal_flow.recovery.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    read_checkpoint_state,
)
from areal_flow.recovery.run_directory import find_run
from areal_flow.store.lineage import Lineage
from areal_flow.store.queries import Run
from areal_flow.tracking.mlflow import RegisteredVersion, registered_version
from areal_flow.tracking.registry import default_tracking_uri
from pipelines.cli.table_file import write_table_file
from pipelines.models import run_of_checkpoint


@dataclass(frozen=True, slots=True)
class Check:
    """A hash that was recorded elsewhere, and whether it is the ledger's."""

    what: str
    found: str
    expected: str

    @property
    def holds(self) -> bool:
        return self.found == self.expected


@dataclass(frozen=True, slots=True)
class Traced:
    """A lineage, how it was asked for, and what its hashes were compared with."""

    lineage: Lineage
    registered: RegisteredVersion | None
    checks: tuple[Check, ...]

    def summary(self) -> dict[str, Any]:
        """Return the lineage's summary with the registered version and the checks."""
        version = self.registered
        return {
            "registered": version
            and {"name": version.name, "version": version.version, "tags": version.tags},
            **self.lineage.summary(),
            "checks": [
                {"what": c.what, "found": c.found, "expected": c.expected, "holds": c.holds}
                for c in self.checks
            ],
        }


def trace(
    runs: Path, reference: str, *, step: int | None = None, registry: str | None = None
) -> Traced:
    """Return the lineage of a registered version, or of a run's step, by default its last.

    Args:
        reference: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, a run's name or its directory.
        registry: MLflow's address, if it is not the database beside the runs.

    Raises:
        ModelError: the registry does not know it, or it lies in no run.
        RunError: there is no such run or step.
    """
    if not reference.startswith("models:/"):
        return _traced(Run(find_run(runs, reference).root), step, None)
    version = registered_version(registry or default_tracking_uri(runs), reference)
    layout = run_of_checkpoint(version.source)
    if layout is None:
        raise ModelError(f"{reference} points to {version.source}, which lies in no run")
    return _traced(Run(layout.root), int(version.tags.get("step", version.source.name)), version)


def print_lineage_json(traced: Traced) -> None:
    """Print a lineage as one JSON object."""
    print(json.dumps(traced.summary(), indent=2))


def export_lineage(traced: Traced, path: Path) -> None:
    """Write the trained trajectories, one row each without tokens, to a Parquet or JSONL file.

    Raises:
        ConfigError: the file's name will not do.
    """
    table = traced.lineage.trajectories("arrow")
    num_rows = write_table_file(path, [table], table.schema)
    print(f"{num_rows} trajectories of version {traced.lineage.version} in {path}")


def _traced(run: Run, step: int | None, version: RegisteredVersion | None) -> Traced:
    newest = run.steps("arrow", columns=["step"])["step"]
    if not len(newest):
        raise ModelError(f"{run.layout.name} has no policy yet: its ledger is empty")
    lineage = run.lineage(max(newest.to_pylist()) if step is None else step)
    return Traced(lineage, version, tuple(_checks(lineage, version)))


def _checks(lineage: Lineage, version: RegisteredVersion | None) -> Iterable[Check]:
    expected = lineage.steps.iloc[-1].weights_hash
    if version is not None:
        yield Check("the registered version", version.tags.get("weights_hash", "none"), expected)
    checkpoints = lineage.run.layout.checkpoints
    if lineage.version in list_checkpoints(checkpoints):
        state = read_checkpoint_state(checkpoint_path(checkpoints, lineage.version))
        yield Check("the checkpoint", state.weights_hash, expected)
