"""A run with a critic survives its trainer's end, is audited, and is replayed to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from areal_flow.layout import RunLayout
from areal_flow.recovery.replay import replay_step
from tests.integration.runs import (
    check_accounting,
    run_while,
    small_recipe,
    step_reached,
    worker_pid,
)


def test_critic_is_restored_with_its_policy_and_replayed_to_the_bit(tmp_path: Path) -> None:
    layout = RunLayout((tmp_path / "c").resolve())

    async def lose_the_trainer() -> None:
        await step_reached(layout, 3)
        os.kill(await worker_pid("trainer"), signal.SIGKILL)
        await step_reached(layout, 6)

    recipe = small_recipe(
        num_steps=10_000,
        prompts={"num_held_out": 0},
        sft={"num_steps": 0},
        trainer={"checkpoint_every_steps": 2},
        algorithm={"name": "ppo_critic", "critic": {"learning_rate": 5e-3}},
    )
    run_while(layout.root, recipe, lose_the_trainer)
    check_accounting(layout)
    found = replay_step(layout, step=6, from_checkpoint=0)
    steps = [*found.before, found.compared]
    assert all(compared.equal for compared in steps)
    assert all("critic_loss" in compared.recorded.metrics.metrics for compared in steps)
