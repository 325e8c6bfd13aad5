"""A run that trains an adapter is audited, replayed and evaluated like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.audit.run import check_run
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.policy import load_policy, policy_tensors
from tests.integration.runs import run_small, small_recipe

pytestmark = pytest.mark.slow


def test_every_step_of_an_adapter_is_replayed_and_what_was_served_is_what_is_exported(
    tmp_path: Path,
) -> None:
    recipe = small_recipe(
        num_steps=3,
        prompts={"num_held_out": 0},
        sft={"num_steps": 0},
        trainer={"learning_rate": 2e-3, "lora": {"rank": 4}},
    )
    layout = run_small(tmp_path / "r", recipe)
    assert check_run(layout).clean
    replay = replay_step(layout, step=3, from_checkpoint=0)
    steps = [*replay.before, replay.compared]
    assert [compared.equal for compared in steps] == [True] * 3
    assert len({compared.recorded.hashes.weights_hash for compared in steps}) == 3
    served = policy_tensors(load_policy(checkpoint_path(layout.checkpoints, 3)))
    assert hash_tensors(served) == replay.recorded.hashes.served_hash
