"""Prompt files and tables: errors that point, resumable order, splits that do not leak."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import EvaluationSettings, Recipe, build_recipe, load_recipe
from areal_flow.core.errors import ConfigError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Prompt
from areal_flow.rewards.functions import function_reward
from areal_flow.rewards.math.reward import verify_numeric
from areal_flow.rewards.protocol import RewardInput, RewardSettings
from areal_flow.rollout.prompts.prepare import check_first_rows, prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.jobs.evaluate import _with_fields
from pipelines.jobs.prepare import describe_prompts, prepare_run, with_fields
from pipelines.tiny_jobs.sums import (
    CHAIN_OF_THOUGHT_FRACTION,
    GUESS_ERROR,
    arithmetic_questions,
    chain_of_thought_answer,
    curriculum,
    direct_answer,
    running_sums,
)
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.chat_templates import CHATML, give_chat_template
from tests.plain import plain
from tests.rows import is_chain_of_thought


def recipe(path: Path, **prompts: Any) -> Recipe:
    return build_recipe(
        {
            "prompts": {"source": "file", "path": str(path), "num_held_out": 4, **prompts},
            "generation": {"max_model_len": 96, "max_new_tokens": 32},
        },
        source="test",
    )


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=96)
    return made


ASKED = {"role": "user", "content": "1 + 1 ="}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def good(index: int) -> dict[str, Any]:
    return {"question": f"{index} + 1 =", "answer": f"#### {index + 1}"}


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ('{"question": "1 + 1 =", "answer"', "not valid JSON"),
        ('["a list"]', "expected a JSON object, found list"),
        ('{"question": "q", "answer": NaN}', "NaN is not JSON"),
        ('{"question": "q", "question": "r", "answer": "1"}', "twice"),
        ("[" * 100_000, "not valid JSON"),
        ({"question": "1 + 1 ="}, "field 'answer' is missing; found fields: question"),
        ({"question": "", "answer": "1"}, "field 'question': expected non-empty text"),
        ({"question": 5, "answer": "1"}, "field 'question'"),
        ({"question": "1 + 1 =", "answer": "two"}, "field 'answer': the numeric verifier"),
        ({"question": "1 + 1 =", "answer": [1, 2]}, "field 'answer': the numeric verifier"),
        ({"question": "1 + 1 =", "answer": None}, "field 'answer': expected non-empty text"),
        ({**good(1), "difficulty": -1}, "field 'difficulty'"),
        ({**good(1), "difficulty": 3_000_000_000}, "field 'difficulty'"),
        ('{"question": "\\ud83d =", "answer": "1"}', "not encodable text"),
        ({"question": "1 + " * 90, "answer": "1"}, "expected 1 to 64"),
    ],
)
def test_bad_line_17_is_named_or_skipped(
    tmp_path: Path, layout: RunLayout, bad: Any, expected: str
) -> None:
    gc.collect()  # what other tests left cannot be finalised at the depth that deep JSON reaches
    path = write_rows(tmp_path / "p.jsonl", [*map(good, range(16)), bad, *map(good, range(20, 30))])
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path).prompt_plan(), layout)
    assert "p.jsonl, line 17" in str(raised.value)
    assert expected in str(raised.value)
    assert "--skip-bad-rows" in str(raised.value)
    prepared = prepare_prompts(recipe(path, skip_bad_rows=True).prompt_plan(), layout)
    assert prepared.num_train + prepared.num_held_out == 26
    assert len(prepared.bad_rows) == 1
    assert "line 17" in layout.bad_rows.read_text()


def test_row_whose_program_nobody_can_test_is_refused(tmp_path: Path, layout: RunLayout) -> None:
    tests = [{"input": "", "output": "2"}]
    tested = [{**good(n), "mode": "stdin", "tests": tests} for n in range(20)]
    path = write_rows(tmp_path / "p.jsonl", [*tested, {**good(20), "mode": "stdin", "tests": 3}])
    code_recipe = recipe(path).model_copy(update={"rewards": [RewardSettings(verifier="code")]})
    with pytest.raises(PromptError, match=r"line 21: the verifier 'code': the row's tests cannot"):
        prepare_prompts(code_recipe.prompt_plan(), layout)


def test_row_whose_answer_is_no_mathematics_is_refused(tmp_path: Path, layout: RunLayout) -> None:
    answers = ["x^2+1", "18", r"\frac{1}{2}", "no solution", r"\boxed{(1,2]}"] * 4
    rows = [{"question": f"{n} + 1 =", "answer": answer} for n, answer in enumerate(answers)]
    path = write_rows(tmp_path / "p.jsonl", [*rows, {"question": "?", "answer": r"\frac{1}{"}])
    math_recipe = recipe(path).model_copy(update={"rewards": [RewardSettings(verifier="math")]})
    with pytest.raises(PromptError, match=r"line 21: the verifier 'math' cannot use the right"):
        prepare_prompts(math_recipe.prompt_plan(), layout)


def test_row_may_have_megabytes_of_tests(tmp_path: Path, layout: RunLayout) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{**good(n), "tests": "x" * 2**21} for n in range(2)])
    assert prepare_prompts(recipe(path).prompt_plan(), layout).num_train == 2


def test_row_may_have_a_word_for_its_difficulty(tmp_path: Path, layout: RunLayout) -> None:
    words = ("hard", "12", "²", "-1")
    path = write_rows(tmp_path / "p.jsonl", [{**good(0), "difficulty": word} for word in words])
    prompts = prepared(recipe(path, num_held_out=0), layout)
    assert [prompt.difficulty for prompt in prompts] == [0, 12, 0, 0]


def test_first_ten_kinds_of_bad_rows_are_named_at_once_in_the_order_of_the_file(
    tmp_path: Path, layout: RunLayout
) -> None:
    bad = {2, *range(5, 60, 5)}  # of lines, from 1: held-out rows and others
    rows: list[Any] = [
        {"question": "?", "answer": chr(ord("a") + line % 26)} if line in bad else good(line)
        for line in range(1, 60)
    ]
    path = write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path).prompt_plan(), layout)
    first, *named, last = str(raised.value).splitlines()
    assert first == f"{len(bad)} rows are bad, the first 10 kinds:"
    lines = [int(text.partition("line ")[2].partition(":")[0]) for text in named]
    assert lines == sorted(bad)[:10]
    assert last == "Fix them, or set prompts.skip_bad_rows (--skip-bad-rows)"


def test_rows_that_are_bad_for_one_reason_are_named_once(tmp_path: Path, layout: RunLayout) -> None:
    rows = [good(line) if line % 3 else {"question": "?"} for line in range(60)]
    path = write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path).prompt_plan(), layout)
    first, named, _ = str(raised.value).splitlines()
    assert first == "20 rows are bad:"
    assert named.endswith(
        "p.jsonl, line 1: field 'answer' is missing; found fields: question (and 19 more such rows)"
    )


def prepared(recipe: Recipe, layout: RunLayout) -> list[Prompt]:
    prepare_prompts(recipe.prompt_plan(), layout)
    return PromptTable(layout.train_prompts, seed=0).rows()


def test_every_column_of_a_row_but_its_answer_is_its_metadata(
    tmp_path: Path, layout: RunLayout
) -> None:
    row = {"id": 7, "difficulty": 2, "tests": ["f(1) == 2"], "entry": {"name": "f"}, "score": 0.5}
    rows = [{**good(0), **row}, {**good(1), "metadata": {"level": 3}}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    first, second = prepared(recipe(path, num_held_out=0), layout)
    assert first.metadata == {"question": good(0)["question"], **row}
    nested = {"metadata": {"level": 3}, "level": 3}
    assert second.metadata == {"question": good(1)["question"], **nested}


def test_column_called_metadata_replaces_no_other(tmp_path: Path, layout: RunLayout) -> None:
    clash = {"question": "other", "answer": "5", "level": 3}
    rows = [
        {**good(0), "metadata": "from a book"},
        {**good(1), "level": 1, "metadata": clash},
        {"question": "2 + 1 =", "final": 3, "metadata": clash},
    ]
    seen = []
    for row, field in zip(rows, ("answer", "answer", "final"), strict=True):
        path = write_rows(tmp_path / "p.jsonl", [row])
        prepare_prompts(recipe(path, num_held_out=0, answer_field=field).prompt_plan(), layout)
        prompt = PromptTable(layout.train_prompts, seed=0).row(0)
        seen.append((dict(prompt.metadata), prompt.answer))
    assert seen == [
        ({"question": "0 + 1 =", "metadata": "from a book"}, "#### 1"),
        ({"question": "1 + 1 =", "level": 1, "metadata": clash}, "#### 2"),
        ({"question": "2 + 1 =", "final": 3, "level": 3, "metadata": clash}, 3),
    ]


def test_tests_of_a_row_do_not_travel_with_its_prompt(tmp_path: Path, layout: RunLayout) -> None:
    tests = [{"input": "1" * 1000, "output": "2"}] * 1000
    path = write_rows(tmp_path / "p.jsonl", [{**good(n), "tests": tests, "n": n} for n in range(9)])
    prompts = prepared(recipe(path, num_held_out=0), layout)
    for prompt in prompts:
        sent = pickle.dumps(prompt)
        assert len(sent) < 2000
        arrived = pickle.loads(sent)
        assert arrived.metadata == prompt.metadata
        assert (arrived.metadata["n"], arrived.metadata["tests"]) == (prompt.metadata["n"], tests)
    assert {prompt.metadata["n"] for prompt in prompts} == {*range(9)}


def test_metadata_of_parquet_is_json_whatever_its_types(tmp_path: Path, layout: RunLayout) -> None:
    row = {"written": date(2024, 5, 1), "sizes": [1, None], "num": 3, "is": True, "s": {"a": 0.5}}
    pq.write_table(pa.Table.from_pylist([{**good(0), **row}]), tmp_path / "p.parquet")
    (first,) = prepared(recipe(tmp_path / "p.parquet", num_held_out=0), layout)
    assert first.metadata == {"question": "0 + 1 =", **row, "written": "2024-05-01"}


ANSWERS = ["#### 1", "[1]", 42, -0.5, 1e-05, [3, 4], {"x": [1]}, True]


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_answer_keeps_its_type_and_is_stored_as_text(
    tmp_path: Path, layout: RunLayout, answer: Any, kind: str
) -> None:
    path, row = tmp_path / f"p.{kind}", {"question": "q", "solution": answer, "answer": "another"}
    if kind == "jsonl":
        write_rows(path, [row])
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    settings = {"num_held_out": 0, "answer_field": "solution"}
    chosen = recipe(path, **settings).model_copy(
        update={"rewards": (RewardSettings(verifier="exact"),)}
    )
    (prompt,) = prepared(chosen, layout)
    assert prompt.answer == answer
    assert type(prompt.answer) is type(answer)
    assert prompt.metadata == {"question": "q", "solution": answer, "answer": "another"}
    (stored,) = pa.ipc.open_file(layout.train_prompts).read_all()["answer"].to_pylist()
    assert stored == (answer if isinstance(answer, str) else json.dumps(answer))


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        (
            {"prompt": "q", "solution": "1"},
            "field 'question' is missing, field 'answer' is missing; found fields: prompt, "
            'solution; set prompts.question_field = "prompt" and prompts.answer_field = "solution"',
        ),
        (
            {"messages": [ASKED], "answer": "1"},
            'set prompts.question_field = "messages". Fix',
        ),
        ({"question": "q", "ground_truth": 3}, 'set prompts.answer_field = "ground_truth"'),
        ({"text": "q", "answer": "1"}, "found fields: answer, text. Fix it"),
    ],
)
def test_missing_field_comes_with_the_setting_that_takes_the_one_that_is_there(
    tmp_path: Path, layout: RunLayout, row: dict[str, Any], advice: str
) -> None:
    fields = {"question_field": "question", "answer_field": "answer"}
    path = write_rows(tmp_path / "p.jsonl", [row])
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path, **fields).prompt_plan(), layout)
    assert advice in str(raised.value)


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [ASKED],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.mark.parametrize(
    ("rows", "fields", "note"),
    [
        ([{"question": "q =", "answer": 3}], ("question", "answer"), ""),
        (
            [{"problem": "q =", "solution": "#### 3", "answer": 3}],
            ("problem", "answer"),
            'question_field = "problem", answer_field = "answer" (ignored: solution)',
        ),
        ([VERL_ROW], ("prompt", "reward_model.ground_truth"), 'question_field = "prompt", '),
        (
            [{"prompt": None, "messages": [ASKED], "solution": "3"}, {"prompt": None}],
            ("messages", "solution"),
            'question_field = "messages", answer_field = "solution"',
        ),
        ([{"text": "q =", "value": 3}], (None, None), "no question_field, no answer_field"),
    ],
)
def test_fields_that_a_recipe_leaves_open_are_found_by_their_usual_names_and_recorded(
    tmp_path: Path, rows: list[dict[str, Any]], fields: tuple[str | None, ...], note: str
) -> None:
    given = recipe(write_rows(tmp_path / "p.jsonl", rows))
    filled, notes = with_fields(given, given)
    assert (filled.prompts.question_field, filled.prompts.answer_field) == fields
    assert [line.startswith(f"Fields of p.jsonl: {note}") for line in notes] == [True] * bool(note)
    again, no_notes = with_fields(filled, filled)
    assert (again, no_notes if fields[0] else []) == (filled, [])


def test_recipe_with_usual_fields_has_the_digest_that_it_had_with_them_as_defaults(
    tmp_path: Path,
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [good(1)])
    explicit = recipe(path, question_field="question", answer_field="answer")
    filled, _ = with_fields(recipe(path), recipe(path))
    assert filled.digest() == explicit.digest()


def test_field_of_prompts_comes_first_in_files_that_have_it(tmp_path: Path) -> None:
    """A set without it is read by the usual names; a field of its own must be there."""
    train = write_rows(tmp_path / "p.jsonl", [{"word": "q =", "value": 3}])
    alike = write_rows(tmp_path / "alike.jsonl", [{"word": "q =", "value": 3, "answer": 4}])
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "q =", "solution": 4}])
    sets = [{"name": p.stem, "path": str(p)} for p in (alike, other)]
    sets.append({"name": "own", "path": str(other), "question_field": "solution"})
    fields = {"question_field": "word", "answer_field": "value"}
    table = recipe(train, **fields).model_dump(mode="json", exclude_none=True)
    given = build_recipe(table, {"evaluation": {"held_out": sets}}, source="test")
    filled, notes = with_fields(given, given)
    chosen = [(s.question_field, s.answer_field) for s in filled.evaluation.held_out]
    assert chosen == [(None, None), ("prompt", "solution"), ("solution", "solution")]
    assert [note.partition(":")[0] for note in notes] == ["Fields of other.jsonl"] * 2


def test_parquet_as_verl_prepares_gsm8k_is_trained_with_its_reward_as_it_is(
    tmp_path: Path, layout: RunLayout
) -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> dict[str, Any]:
        assert (data_source, extra_info["split"]) == ("openai/gsm8k", "train")
        is_right = solution_str.rpartition("#### ")[2] == ground_truth
        return {"score": float(is_right), "index": extra_info["index"]}

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1 = Answer after ####."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n, "question": f"{n} + 1 ="},
        }
        for n in range(6)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    give_chat_template(layout.model, CHATML)
    given = recipe(tmp_path / "train.parquet", num_held_out=0, chat_template=True)
    filled, _ = with_fields(given, given)
    prompts = prepared(filled, layout)
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3", "4", "5", "6"]
    inputs = [
        RewardInput(prompt.text, "so #### 3", prompt.answer, dict(prompt.metadata))
        for prompt in prompts
    ]
    scores = asyncio.run(function_reward(compute_score, timeout_s=5).score(inputs))
    assert [score.reward for score in scores] == [0, 0, 1, 0, 0, 0]
    assert [score.extra["index"] for score in scores] == [*range(6)]


def test_evaluated_files_are_read_by_their_own_fields(tmp_path: Path) -> None:
    """Neither a run's own rows nor its other sets, which may be gone, are looked at."""
    file = write_rows(tmp_path / "other.jsonl", [{"prompt": "q =", "solution": 4}])
    sets = [{"name": name, "path": str(file)} for name in ("given", "own")]
    fields = {"question_field": "word", "answer_field": "value"}
    table = recipe(tmp_path / "gone.jsonl", **fields).model_dump(mode="json", exclude_none=True)
    run = build_recipe(table, {"evaluation": {"held_out": sets}}, source="test")
    filled, notes = _with_fields(run, ["given"])
    chosen = [(s.question_field, s.answer_field) for s in filled.evaluation.held_out]
    assert chosen == [("prompt", "solution"), (None, None)]
    assert len(notes) == 1


def test_nested_fields_are_read_and_a_column_of_the_full_name_comes_first(
    tmp_path: Path, layout: RunLayout
) -> None:
    give_chat_template(layout.model, CHATML)
    settings = {"num_held_out": 0, "chat_template": True}
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([VERL_ROW]), path)
    (prompt,) = prepared(recipe(path, **settings), layout)
    assert prompt.answer == "2"
    assert prompt.metadata == VERL_ROW
    assert "1 + 1 =" in prompt.text
    row = {"a": {"q": "2 =", "b": {"c": 2}}, "a.b.c": 5}
    path = write_rows(tmp_path / "p.jsonl", [row])
    fields = {"question_field": "a.q", "answer_field": "a.b.c"}
    (prompt,) = prepared(recipe(path, num_held_out=0, **fields), layout)
    assert (prompt.text, prompt.answer, prompt.metadata) == ("2 =", 5, row)
    with pytest.raises(PromptError, match=r"field 'a\.b\.d' is missing"):
        prepared(recipe(path, num_held_out=0, question_field="a.q", answer_field="a.b.d"), layout)


def test_file_without_a_good_row_comes_with_the_settings_that_name_its_fields(
    tmp_path: Path, layout: RunLayout
) -> None:
    rows = [{"word": "abc", "mirror": "cba"}] * 20
    with pytest.raises(PromptError, match=r"no row is good: prompts\.question_field and"):
        prepare_prompts(recipe(write_rows(tmp_path / "p.jsonl", rows)).prompt_plan(), layout)


def test_missing_empty_and_unknown_files(tmp_path: Path, layout: RunLayout) -> None:
    with pytest.raises(PromptError, match="found none"):
        prepare_prompts(recipe(tmp_path / "absent.jsonl").prompt_plan(), layout)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(PromptError, match="is empty: expected one row or more"):
        prepare_prompts(recipe(tmp_path / "empty.jsonl").prompt_plan(), layout)
    (tmp_path / "p.txt").write_text("question,answer\n")
    with pytest.raises(PromptError, match=r"save_to_disk`, found \.txt"):
        prepare_prompts(recipe(tmp_path / "p.txt").prompt_plan(), layout)
    (tmp_path / "p.parquet").write_text("not parquet")
    with pytest.raises(PromptError, match="not a readable Parquet"):
        prepare_prompts(recipe(tmp_path / "p.parquet").prompt_plan(), layout)


def test_parquet_equals_jsonl(tmp_path: Path, layout: RunLayout) -> None:
    rows = [good(index) for index in range(30)]
    write_rows(tmp_path / "p.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    tables = []
    for name in ("p.jsonl", "p.parquet"):
        prepare_prompts(recipe(tmp_path / name).prompt_plan(), layout)
        table = PromptTable(layout.train_prompts, seed=0)
        tables.append([table.row(i) for i in range(len(table))])
    assert plain(tables[0]) == plain(tables[1])


def test_held_out_prompts_are_never_trained_on(tmp_path: Path, layout: RunLayout) -> None:
    rows = [good(index % 12) for index in range(60)]
    prepared = prepare_prompts(recipe(write_rows(tmp_path / "p.jsonl", rows)).prompt_plan(), layout)
    assert prepared.num_train + prepared.num_held_out + prepared.num_repeated == 60
    held = PromptTable(layout.held_out_prompts, seed=0).rows()
    train = PromptTable(layout.train_prompts, seed=0).rows()
    assert held
    assert len({p.text for p in held}) == len(held)
    assert not {p.text for p in held} & {p.text for p in train}


def test_no_prompt_of_any_held_out_set_is_trained_on(tmp_path: Path, layout: RunLayout) -> None:
    path = write_rows(tmp_path / "p.jsonl", [good(index) for index in range(40)])
    problems = [{"problem": f"{n} + 1 =", "answer": "1"} for n in (3, 4, 90, 91)]
    file = write_rows(tmp_path / "problems.jsonl", problems)
    own = {"name": "problems", "path": str(file), "question_field": "problem", "num_prompts": 3}
    sets = EvaluationSettings.model_validate({"held_out": [own]})
    settings = recipe(path, num_held_out=0).model_copy(update={"evaluation": sets})
    prepared = prepare_prompts(settings.prompt_plan(), layout)
    assert (prepared.num_train, prepared.num_held_out, prepared.num_repeated) == (38, 3, 2)
    held = PromptTable(layout.held_out_prompts, seed=0).rows()
    assert [(p.text, p.source) for p in held] == [
        (row["problem"], "problems") for row in problems[:3]
    ]
    train = PromptTable(layout.train_prompts, seed=0).rows()
    assert not {p.text for p in held} & {p.text for p in train}


def test_held_out_sets_of_code_and_of_numbers_are_each_judged_by_their_own(
    tmp_path: Path, layout: RunLayout
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [good(index) for index in range(40)])
    tested = {"question": "f =", "answer": "none", "mode": "stdin"}
    tested["tests"] = [{"input": "", "output": "2"}]
    code = write_rows(tmp_path / "code.jsonl", [tested])
    numbers, programs = RewardSettings(), RewardSettings(verifier="code", sources=("code",))
    table = recipe(path).model_dump(mode="json", exclude_none=True)
    table["evaluation"]["held_out"] = [{"name": "code", "path": str(code)}]
    table["rewards"] = [programs.model_dump()]
    with pytest.raises(ConfigError, match="one must judge the prompts to train on"):
        build_recipe(table, source="test")
    table["rewards"].append(numbers.model_dump())
    with pytest.raises(PromptError, match=r"code.jsonl, line 1: .* the numeric verifier"):
        prepare_prompts(build_recipe(table, source="test").prompt_plan(), layout)
    table["sources"] = [{"name": "sums", "path": table["prompts"].pop("path")}]
    table["prompts"]["source"] = "arithmetic"
    table["rewards"][1]["sources"] = ["sums"]
    prepare_prompts(build_recipe(table, source="test").prompt_plan(), layout)
    held = PromptTable(layout.held_out_prompts, seed=0).rows()
    assert [p.source for p in held] == ["sums"] * 4 + ["code"]


def test_every_epoch_shows_every_prompt_once_in_another_order(
    tmp_path: Path, layout: RunLayout
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [good(index) for index in range(50)])
    prepare_prompts(recipe(path).prompt_plan(), layout)
    table = PromptTable(layout.train_prompts, seed=3)
    n = len(table)
    epochs = [[table.prompt_at(e * n + i).text for i in range(n)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == n
    assert epochs[0] != epochs[1] != epochs[2]
    again = PromptTable(layout.train_prompts, seed=3)
    assert [again.prompt_at(2 * n + i).text for i in range(n)] == epochs[2]
    other = PromptTable(layout.train_prompts, seed=4)
    assert [other.prompt_at(i).text for i in range(n)] != epochs[0]


def test_arithmetic_answers_are_right_both_ways() -> None:
    questions = list(arithmetic_questions(size=300, seed=0, min_terms=3, max_terms=7, stream=1))
    assert len({question["question"] for question in questions}) == 300
    assert {question["difficulty"] for question in questions} == {3, 4, 5, 6, 7}
    for question in questions:
        text = question["question"]
        for answer in (chain_of_thought_answer(text), direct_answer(text)):
            score = verify_numeric(prompt="", completion=answer, answer=question["answer"])
            assert score.verdict == "correct"
        assert len(running_sums(text)) == question["difficulty"]
        assert is_chain_of_thought(chain_of_thought_answer(text))
        assert not is_chain_of_thought(direct_answer(text))


def test_curriculum_ends_with_guesses_that_are_seldom_right() -> None:
    questions = list(arithmetic_questions(size=300, seed=0, min_terms=3, max_terms=7, stream=1))
    texts = [row["question"] for row in questions]
    rows = list(curriculum(texts, num_steps=200, batch_size=64, seed=0))
    assert len(rows) == 200 * 64
    early, late = rows[: 176 * 64], rows[176 * 64 :]
    for row in early:
        assert row["completion"] == chain_of_thought_answer(row["prompt"])
    guesses = [row for row in late if not is_chain_of_thought(row["completion"])]
    assert 1 - len(guesses) / len(late) == pytest.approx(CHAIN_OF_THOUGHT_FRACTION, abs=0.05)
    errors = [
        int(row["completion"].split()[-1]) - running_sums(row["prompt"])[-1] for row in guesses
    ]
    assert set(errors) == {*range(-GUESS_ERROR, GUESS_ERROR + 1)}
    assert errors.count(0) / len(errors) == pytest.approx(1 / 7, abs=0.05)


def test_sums_are_those_of_reasoning_gym() -> None:
    """The default job's figures are of them: `chain_sum` 0.1.25, seeds from 1,000,000,000 on."""
    drawn = arithmetic_questions(size=3, seed=0, min_terms=3, max_terms=7, stream=1)
    assert [(row["question"], row["answer"]) for row in drawn] == [
        ("6 - 4 + 7 + 1 - 8 + 3 - 0 =", "5"),
        ("2 + 3 - 9 - 0 - 6 =", "-10"),
        ("9 - 0 + 7 + 0 =", "16"),
    ]


def test_seeds_and_streams_share_no_items() -> None:
    def texts(seed: int, stream: int) -> set[str]:
        questions = arithmetic_questions(
            size=400, seed=seed, min_terms=6, max_terms=7, stream=stream
        )
        return {question["question"] for question in questions}

    drawn = [texts(seed, stream) for seed in (0, 1, 2) for stream in (0, 1)]
    for index, first in enumerate(drawn):
        for second in drawn[index + 1 :]:
            assert len(first & second) <= 2


def test_too_few_distinct_sums_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(PromptError, match="distinct sums"):
        list(arithmetic_questions(size=5000, seed=0, min_terms=2, max_terms=2, stream=0))


def test_bad_rows_are_refused_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "1 + 1 =", "answer": "2"}\n{"question": "2 + 2 ="}\n')
    with pytest.raises(PromptError, match=r"line 2: field 'answer' is missing"):
        check_first_rows(recipe(path).prompt_plan(), tmp_path)
    check_first_rows(recipe(path, skip_bad_rows=True).prompt_plan(), tmp_path)
    path.write_text("")
    with pytest.raises(PromptError, match="is empty: expected one row or more"):
        check_first_rows(recipe(path, skip_bad_rows=True).prompt_plan(), tmp_path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_each_file_without_a_row_is_named(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, write_rows(tmp_path / "good.jsonl", [good(1)])
    path.write_text("\n \n")
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"question": [], "answer": []}), path)
    for given in (recipe(path), recipe(other, held_out_path=str(path))):
        with pytest.raises(PromptError, match=rf"{name} is empty: expected one row or more"):
            check_first_rows(given.prompt_plan(), tmp_path)


def test_run_of_too_few_rows_to_hold_one_out_evaluates_nothing(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [*map(good, range(4))])
    layout, given = RunLayout(tmp_path / "run"), recipe(path)
    layout.train_prompts.parent.mkdir(parents=True)
    assert given.has_held_out
    assert "no evaluation" in prepare_run(layout, given)
    assert not load_recipe(layout.config).has_held_out


def test_rows_of_messages_are_not_bad_before_the_chat_template_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    messages = [{"role": "user", "content": "1 + 1 ="}]
    path.write_text(json.dumps({"question": messages, "answer": "2"}) + "\n")
    check_first_rows(recipe(path).prompt_plan(), tmp_path)


def test_fewer_held_out_rows_than_requested_are_reported(tmp_path: Path, layout: RunLayout) -> None:
    path = write_rows(tmp_path / "p.jsonl", [*map(good, range(20))])
    prepared = prepare_prompts(recipe(path, num_held_out=9).prompt_plan(), layout)
    assert prepared.num_held_out == 4
    assert f"4 of {path} may be held out, fewer than num_held_out" in describe_prompts(
        prepared, layout
    )
    assert "may be held out" not in describe_prompts(
        prepare_prompts(recipe(path).prompt_plan(), layout), layout
    )


@pytest.mark.parametrize(
    ("verifier", "is_needed"),
    [
        *(("numeric", True), ("regex", True), ("reasoning_gym", True), ("format", False)),
        *(("code", False), ("judge", False)),
        *(("tests.unit.test_prompts:brevity", False), ("tests.unit.test_prompts:equals", True)),
        *(("tests.unit.test_prompts:near", False), ("tests.unit.test_prompts:verl", True)),
        *(("tests.unit.test_prompts:batched", False), ("tests.unit.test_prompts:Own", False)),
    ],
)
def test_rows_need_an_answer_only_if_a_reward_reads_it(
    tmp_path: Path, verifier: str, is_needed: bool
) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": None if n else ""} for n in range(9)]
    table = recipe(write_rows(tmp_path / "p.jsonl", rows), num_held_out=0).model_dump(
        mode="json", exclude_none=True
    )
    table["rewards"] = [{"verifier": verifier}]
    plan = build_recipe(table, source="test").prompt_plan()
    with pytest.raises(PromptError, match="field 'answer'") if is_needed else nullcontext():
        check_first_rows(plan, tmp_path)


def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


def equals(completion: str, answer: str) -> float:
    return float(completion == answer)


def near(completion: str, answer: str = "0") -> float:
    return float(completion == answer)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def batched(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


class Own:
    async def score(self, inputs: Any) -> Any: ...


def test_rows_need_no_answer_where_nothing_scores_by_it(tmp_path: Path, layout: RunLayout) -> None:
    give_chat_template(layout.model, CHATML)
    rows = [{"question": f"{n} + 1 ="} for n in range(9)] + [{"question": "9 =", "answer": "9"}]
    base = recipe(write_rows(tmp_path / "rows.jsonl", rows), num_held_out=0, chat_template=True)
    table = base.model_dump(mode="json", exclude_none=True)
    given = build_recipe(table, {"workflow": {"name": "agent", "path": "my:agent"}}, source="test")
    check_first_rows(given.prompt_plan(), tmp_path)
    prepare_prompts(given.prompt_plan(), layout)
    answers = [prompt.answer for prompt in PromptTable(layout.train_prompts, seed=0).rows()]
    assert sorted(answers, key=str) == ["9", *[None] * 9]
    check = partial(check_first_rows, rewards=tmp_path)
    for unanswered in (check, partial(prepare_prompts, layout=layout)):
        with pytest.raises(PromptError, match="field 'answer' is missing"):
            unanswered(base.prompt_plan())
