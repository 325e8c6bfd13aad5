"""The verdict on who waits for whom, from numbers alone."""

from __future__ import annotations

import pytest

from areal_flow.flow.diagnosis import find_bottleneck, judge_speed


@pytest.mark.parametrize(
    ("waiting", "busy", "queue", "text", "remedy"),
    [
        (0.6, 0.97, 0.1, "Generation is the bottleneck", "cluster.num_generators"),
        (0.6, 0.97, 1.1, "Scoring is the bottleneck", "cluster.num_reward_workers"),
        (0.6, 0.79, 0.1, "Both sides wait for each other", "controller.max_staleness"),
        (0.19, 0.79, 0.1, "Training is the bottleneck", "cluster.num_trainers"),
        (0.19, 0.8, 9.0, "Neither side waits for long", ""),
        (0.2, 0.8, 1.0, "Generation is the bottleneck", "cluster.num_generators"),
    ],
)
def test_verdict_names_who_is_slow_and_what_helps(
    waiting: float, busy: float, queue: float, text: str, remedy: str
) -> None:
    verdict = judge_speed(waiting, busy, queue)
    assert verdict.text.startswith(f"{text}: the trainer waits {waiting:.0%} of its time")
    assert remedy in verdict.remedy
    assert bool(verdict.remedy) == bool(remedy)


def test_shares_are_of_all_steps_together() -> None:
    parts = {"read_s": 0.1, "train_s": 1.0, "stage_s": 0.1}
    step = {**parts, "num_generated_tokens": 9, "num_trained_tokens": 9, "wait_s": 0.0}
    short = {**step, "step_s": 1.0, "generate_s": 1.0}
    long = {**step, "step_s": 3.0, "generate_s": 3.0, "wait_s": 2.0}
    verdict = find_bottleneck([short, long], num_generators=2)
    assert "waits 50% of its time for data, generators are busy 50%" in verdict.text
    observed = {"speed/generators_observed_s": 2.5}
    assert "busy 80%" in find_bottleneck([short | observed, long | observed], num_generators=2).text


def test_a_queue_longer_than_a_step_is_a_reason_to_score_with_more_workers() -> None:
    numbers = dict.fromkeys(("read_s", "train_s", "stage_s"), 0.1)
    numbers |= {"num_generated_tokens": 9, "num_trained_tokens": 9, "generate_s": 2.0}
    step = {**numbers, "step_s": 2.0, "wait_s": 1.0}
    for queue_s, text in ((5.0, "a group waits 2.5 steps to be scored"), (1.0, "Generation is")):
        row = step | {"speed/reward_queue_s_mean": queue_s}
        assert text in find_bottleneck([row, row], num_generators=1).text
