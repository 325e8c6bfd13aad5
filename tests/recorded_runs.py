"""Runs whose steps a trainer rank computed in this process, so that they can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_flow.config import build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import StepRequest
from areal_flow.log.directory import create_run
from areal_flow.log.ledger_row import (
    Provenance,
    StepEntries,
    batch_digest,
    genesis_row,
    step_row,
)
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import TrainingRows
from areal_flow.policy.models.policy import load_policy
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.rank import TrainerRank
from tests.policies import write_model_directory
from tests.rows import append, commit, written_group

WRITER = Writer(Path("nobody"), 1)
PROVENANCE = Provenance(1, "", "")


def make_recorded_run(root: Path, **settings: Any) -> RunLayout:
    """Make a run of two steps with a checkpoint of step 0."""
    layout = RunLayout(root)
    algorithm = {"advantage": "rloo", "num_minibatches": 2}
    recipe = build_recipe({"algorithm": algorithm, **settings}, source="")
    create_run(layout, recipe)
    write_model_directory(layout.model)
    create_logs(layout)
    written = [written_group(layout.trajectories, index) for index in range(4)]
    log = RunLog(layout, WRITER)
    commit(log, *written)
    read = TrainingRows(layout)
    rank = TrainerRank(layout, recipe.for_trainer(), channel=HashingWriter(), read_rows=read)
    rank.adopt(load_policy(layout.model))
    hashes, environment = rank.stage_initial_policy()
    append(log, genesis_row(hashes, provenance=PROVENANCE, numeric_environment=environment))
    layout.checkpoints.mkdir()
    rank.snapshot(weights_hash=hashes.weights_hash, next_submission_index=0)
    rank.write_snapshot(0, WRITER)
    rank.complete_snapshot(0, WRITER)
    for step in (1, 2):
        groups = written[2 * step - 2 : 2 * step]
        ids = tuple(t.trajectory_id for group in groups for t in group.trajectories)
        digest = batch_digest(step - 1, ids)
        request = StepRequest(step, hashes.weights_hash, step - 1, ids, digest, 2)
        result = rank.step(request)
        hashes = result.hashes
        append(
            log,
            step_row(
                request,
                result,
                entries=StepEntries(),
                watermark=8,
                next_submission_index=0,
                num_waiting_tokens=0,
                provenance=PROVENANCE,
                wait_s=0.0,
                step_s=0.0,
                num_generators=2,
            ),
        )
    return layout
