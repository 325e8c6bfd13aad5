"""Replay with changed losses and algorithms, on a run made in this process, without a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.algorithms.registry import ALGORITHMS, DecoupledPPO
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.ledger import LedgerReader
from areal_flow.policy.checkpoints import checkpoint_path, read_checkpoint_state
from tests.recorded_runs import make_recorded_run


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_recorded_run(tmp_path / "r")


def unweighted(inputs: LossInputs) -> PolicyLoss:
    on_policy = replace(inputs, behavior_logprobs_T=inputs.proximal_logprobs_T)
    return DecoupledPPO().loss(on_policy)


def test_step_is_replayed_with_its_own_loss_another_one_and_another_algorithm(
    layout: RunLayout,
) -> None:
    replay = replay_step(layout, step=2, loss=unweighted)
    assert replay.compared.equal
    assert not replay.refused
    assert replay.changes == {"loss": ("decoupled_ppo", "unweighted")}
    assert replay.changed is not None
    assert replay.changed.metrics.metrics["importance_weight_max"] == 1
    assert replay.replayed.metrics.metrics["importance_weight_max"] < 1
    assert replay.changed.hashes != replay.replayed.hashes
    other = replay_step(layout, step=2, changes={"algorithm": {"name": "gspo"}})
    assert other.compared.equal
    assert other.changed is not None
    assert "ratio_max" in other.changed.metrics.metrics
    assert other.changes["algorithm.name"] == ("decoupled_ppo", "gspo")


VARIANTS = {
    **{name: {"name": name} for name in ALGORITHMS},
    "interpolated": {"proximal": "interpolated", "importance_weight_rule": "truncate"},
    "divergence in the loss": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "divergence in the reward": {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_algorithm_is_replayed_bit_for_bit(tmp_path: Path, variant: str) -> None:
    """Weights, losses and every metric; the reference of a replay is the run's first policy."""
    trainer = {"learning_rate": 0.01}
    layout = make_recorded_run(tmp_path / "r", algorithm=VARIANTS[variant], trainer=trainer)
    replay = replay_step(layout, step=2)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True, True]
    assert replay.compared.recorded.metrics.grad_norm > 0
    if "kl_coefficient" in VARIANTS[variant]:
        divergence = replay.replayed.metrics.metrics["kl_policy_reference"]
        assert divergence != 0
        assert divergence > 0 or VARIANTS[variant].get("kl_estimator") == "k1"


def test_divergence_can_be_tried_on_a_step_that_was_recorded_without(layout: RunLayout) -> None:
    replay = replay_step(layout, step=2, changes={"algorithm": {"kl_coefficient": 0.5}})
    assert replay.compared.equal
    assert replay.changed is not None
    assert "kl_policy_reference" in replay.changed.metrics.metrics


def test_recorded_rates_are_replayed_whatever_num_steps_became(tmp_path: Path) -> None:
    trainer = {"learning_rate": 1e-3, "learning_rate_schedule": "linear"}
    layout = make_recorded_run(tmp_path / "falling", num_steps=1, trainer=trainer)
    layout.config.write_text(
        layout.config.read_text().replace("num_steps = 1\n", "num_steps = 9\n", 1)
    )
    replay = replay_step(layout, step=2)
    rates = [
        compared.recorded.metrics.learning_rate for compared in (*replay.before, replay.compared)
    ]
    assert rates == pytest.approx([1e-3, 3e-5])
    assert replay.before[0].equal
    assert replay.compared.equal


def test_hash_of_the_optimizer_stands_in_the_checkpoint_alone(layout: RunLayout) -> None:
    path = checkpoint_path(layout.checkpoints, 0)
    assert len(read_checkpoint_state(path).optimizer_hash) == 32
    assert "optimizer_hash" not in LedgerReader(layout).rows()[0]
    file = path / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "optimizer_hash": "0" * 32}))
    with pytest.raises(RunError, match="below step 1"):
        replay_step(layout, step=1)
