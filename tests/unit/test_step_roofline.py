"""A step's predicted time is near the measured one, and its operations are the trainer's count."""

from __future__ import annotations

import pytest

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.training.flops import PolicyShape
from benchmarks import step_roofline
from benchmarks.shapes import random_trajectory
from benchmarks.step_roofline import MEASURED, Step, changes, group_seconds, model_flops

ALL = [each for step in MEASURED for each in changes(step)]


@pytest.mark.parametrize("step", [s for s in ALL if s.measured_s], ids=lambda step: step.name)
def test_measured_steps_are_predicted_within_a_tenth(step: Step) -> None:
    assert step.measured_s is not None
    assert sum(group_seconds(step).values()) == pytest.approx(step.measured_s, rel=0.1)


def test_every_change_saves_time() -> None:
    for step in MEASURED:
        seconds = [sum(group_seconds(each).values()) for each in changes(step)]
        assert seconds == sorted(seconds, reverse=True)
        assert len({*seconds}) == len(seconds)


def test_operations_are_those_that_a_trainer_reports() -> None:
    shape = PolicyShape(
        num_weights=step_roofline.LAYERS * step_roofline.LAYER_WEIGHTS,
        hidden=step_roofline.WIDTH,
        head=step_roofline.VOCABULARY * step_roofline.WIDTH,
        attention=step_roofline.LAYERS * step_roofline.HEADS * step_roofline.HEAD_WIDTH,
        trains_weights=True,
    )
    sequences = [random_trajectory(2048, 14_336, 100)]
    flops = shape.step_flops(sequences, [[[[0]]]], DecoupledPPO(num_minibatches=1))
    assert model_flops(16_384) == pytest.approx(flops, rel=1e-3)
