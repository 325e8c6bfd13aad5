"""The scorers of reasoning-gym as a verifier."""

from __future__ import annotations

from typing import Any

import pytest

from areal_flow.core.errors import RewardError
from areal_flow.core.types import Score
from areal_flow.rewards.reasoning_gym import extract_answer, verify_reasoning_gym


def score(completion: str, entry: dict[str, Any], **metadata: Any) -> Score:
    return verify_reasoning_gym(
        prompt=entry["question"],
        completion=completion,
        answer=entry["answer"],
        metadata=metadata or {"metadata": entry["metadata"]},
    )


def test_tasks_judge_answers_to_their_own_questions() -> None:
    gym = pytest.importorskip("reasoning_gym")
    for task in ("chain_sum", "leg_counting", "spell_backward"):
        (entry,) = gym.create_dataset(task, size=1, seed=3)
        judged = score(f"so <answer>{entry['answer']}</answer>", entry)
        assert (judged.reward, judged.verdict) == (1.0, "correct"), task
        assert score(str(entry["answer"]), entry, **entry["metadata"]).reward == 1.0, task
        wrong = score("<answer>nothing</answer>", entry)
        assert wrong.verdict == "incorrect", task
        assert wrong.reward is not None, task
        assert wrong.reward < 0.5, task


@pytest.mark.parametrize("task", ["string_insertion", "n_queens", "countdown"])
def test_tasks_that_would_run_what_the_policy_wrote_are_refused(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    entry = {"question": "", "answer": "[]", "metadata": {"source_dataset": task}}
    with pytest.raises(RewardError, match="choose another task"):
        score("<answer>print(1)</answer>", entry)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<answer>3", "3"),
        ("it is \\boxed{4}", "4"),
        ("it is \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("#### 5", "5"),
        (" 6 ", "6"),
    ],
)
def test_last_mark_counts(completion: str, answer: str) -> None:
    assert extract_answer(completion) == answer


def test_row_without_a_task_and_an_unknown_task_are_named() -> None:
    entry = {"question": "", "answer": "", "metadata": {}}
    with pytest.raises(RewardError, match="'source_dataset' in the row's metadata"):
        score("1", entry, x=1)
    pytest.importorskip("reasoning_gym")
    with pytest.raises(RewardError, match="Dataset 'nonsense' not registered"):
        score("1", entry, source_dataset="nonsense")
    with pytest.raises(RewardError, match="task 'composite': Must specify"):
        score("1", entry, source_dataset="composite")
