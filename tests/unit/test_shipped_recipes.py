"""The shipped recipes read rows as published, and the recipe `code` makes its own."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.rewards.code.reward import grade
from areal_flow.rewards.code.rows import CodeTask, code_task
from areal_flow.rollout.prompts.prepare import prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.sandboxes.pool import SandboxPool
from areal_flow.sandboxes.run import SandboxError
from areal_flow.training.settings import AdamWSettings
from pipelines.jobs.built_in import with_files
from pipelines.jobs.job import recipe_path
from pipelines.tiny_jobs import one_liners
from pipelines.tiny_jobs.one_liners import WORDS, coder_tokenizer
from tests.policies import write_model_directory

CASES = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
DEEP_SCALER = {"problem": "What is half of $x$?", "answer": r"\frac{x}{2}", "solution": "Divide."}
MATH = {
    "problem": "What is half of 3?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"It is $\boxed{\frac{3}{2}}$.",
}
DEEP_CODER = {"problem": "Add.", "solutions": ["print(3)"], "tests": CASES, "starter_code": ""}
LIVE_CODE_BENCH = {
    "question_title": "Sum",
    "question_content": "Add.",
    "difficulty": "easy",
    "starter_code": "",
    "public_test_cases": CASES,
    "private_test_cases": CASES,
}


@pytest.mark.parametrize(
    ("name", "row", "fields", "answer"),
    [
        ("deepscaler", DEEP_SCALER, {}, DEEP_SCALER["answer"]),
        ("deepscaler", MATH, {"answer_field": "solution"}, MATH["solution"]),
        ("deepcoder", DEEP_CODER, {}, CASES),
        (
            "deepcoder",
            LIVE_CODE_BENCH,
            {"question_field": "question_content", "answer_field": "public_test_cases"},
            CASES,
        ),
    ],
)
def test_recipes_read_rows_as_they_are_published(
    tmp_path: Path, name: str, row: dict[str, Any], fields: dict[str, str], answer: str
) -> None:
    layout = RunLayout(tmp_path / "run")
    write_model_directory(layout.model)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    prompts = {**fields, "path": str(path), "chat_template": False}
    prepare_prompts(
        load_recipe(recipe_path(Path(name)), {"prompts": prompts}).prompt_plan(), layout
    )
    prompt = PromptTable(layout.train_prompts, seed=0).row(0)
    question = row[fields.get("question_field", "problem")]
    assert prompt.text.startswith(question + "\n")
    assert prompt.answer == answer
    if name == "deepcoder":
        task = code_task({"prompt": prompt.text, **prompt.metadata}, "print(3)")
        assert task is not None
        assert task.tests[0] == ("1 2\n", "3\n")


@pytest.mark.parametrize(("name", "max_staleness"), [("deepscaler", 8), ("deepcoder", 4)])
def test_recipes_have_the_settings_of_the_paper(name: str, max_staleness: int) -> None:
    recipe = load_recipe(recipe_path(Path(name)))
    controller, trainer, cluster = recipe.controller, recipe.trainer, recipe.cluster
    assert (recipe.groups_per_step, controller.group_size) == (512, 16)
    assert controller.max_staleness == max_staleness
    assert recipe.algorithm.num_minibatches == 4
    assert trainer.adamw == AdamWSettings(betas=(0.9, 0.95), weight_decay=0.05)
    assert (trainer.learning_rate, trainer.max_grad_norm) == (2e-5, 1.0)
    assert cluster.num_generators == 3 * cluster.num_trainers


def code_recipe(**prompts: int) -> Recipe:
    return load_recipe(recipe_path(Path("code")), {"prompts": prompts, "sft": {"num_steps": 50}})


def test_job_code_holds_out_functions_and_shows_formulas_before_look_ups(tmp_path: Path) -> None:
    recipe = code_recipe(num_prompts=200, num_held_out=40)
    made = with_files(recipe, RunLayout(tmp_path))
    assert made.prompts.path
    assert made.prompts.held_out_path
    assert made.sft.path
    train, held_out, shown = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (made.prompts.path, made.prompts.held_out_path, made.sft.path)
    )
    questions = {row["question"] for row in train}
    assert (len(questions), len(held_out)) == (200, 40)
    assert not questions & {row["question"] for row in held_out}
    assert {row["prompt"] for row in shown} <= questions
    are_formulas = ["{" not in row["completion"] for row in shown]
    late = round(len(shown) * (1 - one_liners.LATE_PHASE))
    assert sum(are_formulas[:late]) / late == pytest.approx(one_liners.FORMULA_FRACTION, abs=0.03)
    rest = are_formulas[late:]
    assert sum(rest) / len(rest) == pytest.approx(one_liners.LATE_FORMULA_FRACTION, abs=0.07)


def test_job_code_refuses_more_functions_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="at most 2736 one-line functions, found 3000"):
        with_files(code_recipe(num_prompts=2960, num_held_out=40), RunLayout(tmp_path))


def test_formulas_pass_and_look_ups_fail() -> None:
    try:
        pool = SandboxPool()
    except SandboxError as error:
        pytest.skip(str(error))
    drawn = Random(0).sample(list(one_liners.all_functions().values()), 12)
    try:
        for function in drawn:
            tests = [([x], function.call(x)) for x in one_liners.HIDDEN_INPUTS]
            task = CodeTask(function.formula, "call", tests, entry_point="f")
            assert grade(pool, task).verdict == "correct", function.formula
            task = CodeTask(function.look_up, "call", tests, entry_point="f")
            assert grade(pool, task).verdict == "runtime_error", function.look_up
    finally:
        pool.close()


def test_each_piece_of_a_function_is_one_token() -> None:
    tokenizer = coder_tokenizer()
    assert all(len(tokenizer.encode(word).ids) == 1 for word in WORDS)
    for function in one_liners.all_functions().values():
        assert len(tokenizer.encode(function.question).ids) == 11
        assert len(tokenizer.encode(function.formula).ids) <= 8
