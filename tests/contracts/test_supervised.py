"""Every fine-tuning objective: packing changes nothing, and resuming changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areal_flow.algorithms.protocol import LossInputs
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.policy.models.reward_model import describe_reward_model
from areal_flow.training.settings import SftSettings, TrainerSettings
from areal_flow.training.sft import SftTrainer
from areal_flow.training.supervised import OBJECTIVES, read_metrics
from tests.policies import completion_rows, small_policy, write_model_directory
from tests.reward_models import load_reward_model
from tests.unit.test_trainer import hash_of_optimizer

WRITER = Writer(Path("nobody"), 1)


@pytest.fixture(params=OBJECTIVES)
def objective(request: pytest.FixtureRequest) -> Any:
    return request.param


def model_for(objective: Any, layout: RunLayout) -> Any:
    if not OBJECTIVES[objective].makes_reward_model:
        layout.model.mkdir(exist_ok=True)
        return small_policy()
    write_model_directory(layout.model)
    describe_reward_model(layout.model, pad_token_id=0)
    return load_reward_model(layout.model, layout.model)


def trainer(objective: Any, layout: RunLayout, *, room: int = 64) -> SftTrainer:
    return SftTrainer(
        model_for(objective, layout),
        completion_rows(10, num_completions=len(OBJECTIVES[objective].fields)),
        SftSettings(
            objective=objective,
            num_steps=6,
            batch_size=4,
            learning_rate=1e-2,
            num_held_out=2,
            checkpoint_every_steps=2,
        ),
        TrainerSettings(tokens_per_micro_batch=room),
        seed=3,
    )


def test_resuming_from_a_checkpoint_repeats_the_bits(objective: Any, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    straight, stopped = trainer(objective, layout), trainer(objective, layout)
    for _ in range(6):
        straight.take_step()
    for _ in range(3):
        stopped.take_step()
    path = stopped.save(layout, WRITER)
    assert {file.name for file in path.iterdir()} >= {"model.safetensors", "optimizer.safetensors"}
    resumed = trainer(objective, layout)
    resumed.restore(layout)
    assert resumed.step == 3
    for _ in range(3):
        resumed.take_step()
    assert resumed.backend.fingerprint() == straight.backend.fingerprint()
    assert hash_of_optimizer(resumed.backend) == hash_of_optimizer(straight.backend)
    resumed.save(layout, WRITER)
    assert read_metrics(layout) == straight.metrics
    assert [row["step"] for row in straight.metrics if "held_out_loss" in row] == [2, 4, 6]


def test_packing_changes_no_loss(objective: Any, tmp_path: Path) -> None:
    tight, roomy = (trainer(objective, RunLayout(tmp_path), room=room) for room in (24, 400))
    for _ in range(2):
        assert tight.take_step() == pytest.approx(roomy.take_step(), abs=1e-4)
    assert tight.measure_held_out() == pytest.approx(roomy.measure_held_out(), abs=1e-3)


def test_loss_accepts_an_empty_batch(objective: Any) -> None:
    real_T, integer_T = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    inputs = LossInputs(real_T, real_T, real_T, real_T, integer_T, integer_T, 0)
    loss = OBJECTIVES[objective].loss(inputs, SftSettings(objective=objective))
    assert loss.losses_T.shape == (0,)
    assert {*loss.metrics} <= {*OBJECTIVES[objective].metrics}
