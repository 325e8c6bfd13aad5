"""The recipe `calculator`: valid questions, and demonstrations like its episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import ConfigError, PromptError
from areal_flow.policy.tokenizer.chat import ToolCall
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.rollout.tools import calculate
from areal_flow.rollout.workflows.tool_use import ToolUse, marked_call
from pipelines.jobs.built_in import MODELS
from pipelines.jobs.job import recipe_path
from pipelines.tiny_jobs.sums import called, demonstrations, make_calculator


def recipe(**prompts: int) -> Recipe:
    return load_recipe(recipe_path(Path("calculator")), {"prompts": prompts})


def test_recipe_is_a_file_or_the_name_of_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert recipe_path(Path("calculator")).parent.name == "recipes"
    with pytest.raises(ConfigError, match=r"expected a recipe at runs or one of arithmetic, "):
        recipe_path(Path("runs"))
    with pytest.raises(ConfigError, match=r"found no such file\. Did you mean gsm8k-1gpu\?$"):
        recipe_path(Path("gsm8k-1gpuu"))
    (tmp_path / "calculator").write_text("")
    assert recipe_path(Path("calculator")) == Path("calculator")


def test_source_says_how_many_questions_there_are() -> None:
    with pytest.raises(PromptError, match="expected at most 1000 questions to hold out"):
        make_calculator(recipe(num_held_out=2000))


def test_questions_are_right_and_what_is_held_out_is_never_trained() -> None:
    train, held_out = make_calculator(recipe(num_prompts=400, num_held_out=100))
    assert (len(train), len(held_out)) == (400, 100)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    for row in [*train, *held_out]:
        assert calculate(row["question"].removesuffix(" =")) == row["answer"]
    assert {row["difficulty"] for row in held_out} == {1, 2}


def test_demonstrated_call_is_the_workflows() -> None:
    workflow = recipe().workflow
    assert isinstance(workflow, ToolUse)
    call_text, shown, answer = called("347*86")
    call = marked_call(call_text, start=workflow.call_start, end=workflow.call_end)
    assert call is not None
    assert call == ToolCall("calculator", {"input": "347*86"})
    assert shown == workflow.result_template.replace("{result}", "29842")
    assert answer == " #### 29842"


def test_warm_start_calls_for_products_first_and_shows_both_ways_late() -> None:
    questions = ["1+2+3 =", "347*86 ="]
    rows = [*demonstrations(questions, num_steps=100, batch_size=20, seed=0)]
    calls = [(row["prompt"], len(row["completion"]) == 3) for row in rows]
    assert set(calls[:1600]) == {(questions[0], False), (questions[0], True), (questions[1], True)}
    assert (questions[1], False) in calls[1800:]


def test_marks_and_pairs_of_digits_are_one_token_each(tmp_path: Path) -> None:
    MODELS["tiny_calculator"](tmp_path, max_model_len=32)
    tokenizer = tokenizer_of(tmp_path)
    lengths = [len(tokenizer.encode(turn).ids) for turn in ("347*86 =", *called("347*86"))]
    assert lengths == [5, 6, 5, 4]
    for turn in called("347*86"):
        assert tokenizer.decode(tokenizer.encode(turn).ids) == turn
