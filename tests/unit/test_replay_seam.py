"""Replay over the algorithm's seam, on a run that is made in this process: no cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.config import build_recipe, dump_recipe
from areal_flow.controller.accounting import StepEntries
from areal_flow.controller.records import (
    Provenance,
    batch_digest,
    genesis_row,
    step_row,
)
from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.models.policy import load_policy
from areal_flow.recovery.checkpoints import checkpoint_path, read_checkpoint_state
from areal_flow.recovery.lease import Writer
from areal_flow.recovery.replay import replay_step
from areal_flow.recovery.run_directory import write_identity
from areal_flow.store.ledger import Ledger, create_ledger
from areal_flow.store.trajectories import TrainingRows, TrajectoryCommitter, create_trajectories
from areal_flow.trainer.rank import TrainerRank
from areal_flow.types import LogHead, StepRequest
from areal_flow.weights.channel import HashingWriter
from tests.policies import write_model_directory
from tests.rows import written_group

WRITER = Writer(Path("nobody"), 1)
PROVENANCE = Provenance(1, "", "")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run of two steps with a checkpoint of step 0."""
    layout = RunLayout(tmp_path / "r")
    write_model_directory(layout.model)
    recipe = build_recipe({"algorithm": {"advantage": "rloo", "num_minibatches": 2}}, source="")
    write_identity(layout)
    layout.config.write_text(dump_recipe(recipe))
    create_ledger(layout.steps)
    create_trajectories(layout.trajectories)
    written = [written_group(layout.trajectories, index) for index in range(4)]
    TrajectoryCommitter(layout.trajectories, WRITER).commit(written)
    ledger = Ledger(layout.steps, WRITER)
    read = TrainingRows(layout.trajectories, layout.writers)
    rank = TrainerRank(layout, recipe, channel=HashingWriter(), read_rows=read)
    rank.adopt(load_policy(layout.model))
    hashes, environment = rank.genesis()
    ledger.append(genesis_row(hashes, provenance=PROVENANCE, numeric_environment=environment))
    layout.checkpoints.mkdir()
    rank.snapshot(weights_hash=hashes.weights_hash, next_submission_index=0)
    rank.write_snapshot(0, WRITER)
    for step in (1, 2):
        groups = written[2 * step - 2 : 2 * step]
        ids = tuple(t.trajectory_id for group in groups for t in group.trajectories)
        digest = batch_digest(step - 1, ids)
        request = StepRequest(step, hashes.weights_hash, step - 1, ids, digest, 2)
        result = rank.step(request)
        hashes = result.hashes
        ledger.append(
            step_row(
                request,
                result,
                entries=StepEntries(),
                log_head=LogHead(8, 0),
                next_submission_index=0,
                num_waiting_tokens=0,
                provenance=PROVENANCE,
                seconds_wait=0.0,
                seconds_step=0.0,
                num_generators=2,
            )
        )
    return layout


def unweighted(inputs: LossInputs) -> PolicyLoss:
    on_policy = replace(inputs, behavior_logprobs_T=inputs.proximal_logprobs_T)
    return DecoupledPPO().loss(on_policy)


def test_step_is_replayed_with_its_own_loss_another_one_and_another_algorithm(
    layout: RunLayout,
) -> None:
    found = replay_step(layout, step=2, loss=unweighted)
    assert found.compared.equal
    assert not found.refused
    assert found.changes == {"loss": ("decoupled_ppo", "unweighted")}
    assert found.changed is not None
    assert found.changed.metrics.metrics["importance_weight_max"] == 1
    assert found.replayed.metrics.metrics["importance_weight_max"] < 1
    assert found.changed.hashes != found.replayed.hashes
    other = replay_step(layout, step=2, changes={"algorithm": {"name": "gspo"}})
    assert other.compared.equal
    assert other.changed is not None
    assert "sequence_ratio_max" in other.changed.metrics.metrics
    assert other.changes["algorithm.name"] == ("decoupled_ppo", "gspo")


def test_hash_of_the_optimizer_stands_in_the_checkpoint_alone(layout: RunLayout) -> None:
    path = checkpoint_path(layout.checkpoints, 0)
    assert len(read_checkpoint_state(path).optimizer_hash) == 32
    assert "optimizer_hash" not in Ledger(layout.steps, WRITER).rows()[0]
    file = path / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "optimizer_hash": "0" * 32}))
    with pytest.raises(RunError, match="below step 1"):
        replay_step(layout, step=1)
