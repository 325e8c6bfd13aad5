"""Prompt files and tables: errors that point, resumable order, splits that do not leak."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import Recipe, build_recipe
from areal_flow.errors import PromptError
from areal_flow.layout import RunLayout
from areal_flow.prompts.prepare import prepare_prompts
from areal_flow.prompts.table import PromptTable
from areal_flow.rewards.numeric import verify_numeric
from pipelines.arithmetic.sums import (
    arithmetic_questions,
    chain_of_thought_answer,
    direct_answer,
    running_sums,
)
from pipelines.arithmetic.tiny_policy import write_tiny_model
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
        ({**good(1), "difficulty": -1}, "field 'difficulty'"),
        ({**good(1), "difficulty": 3_000_000_000}, "field 'difficulty'"),
        ('{"question": "\\ud83d =", "answer": "1"}', "not encodable text"),
        ({"question": "1 + " * 90, "answer": "1"}, "expected 1 to 64"),
    ],
)
def test_bad_line_17_is_named_or_skipped(
    tmp_path: Path, layout: RunLayout, bad: Any, expected: str
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [*map(good, range(16)), bad, *map(good, range(20, 30))])
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path), layout)
    assert "p.jsonl, line 17" in str(raised.value)
    assert expected in str(raised.value)
    assert "--skip-bad-rows" in str(raised.value)
    prepared = prepare_prompts(recipe(path, skip_bad_rows=True), layout)
    assert prepared.num_train + prepared.num_held_out == 26
    assert len(prepared.bad_rows) == 1
    assert "line 17" in layout.bad_rows.read_text()


def test_first_ten_bad_rows_are_named_at_once_in_the_order_of_the_file(
    tmp_path: Path, layout: RunLayout
) -> None:
    bad = {2, *range(5, 60, 5)}  # of lines, from 1: held-out rows and others
    rows: list[Any] = ["{" if line in bad else good(line) for line in range(1, 60)]
    path = write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(PromptError) as raised:
        prepare_prompts(recipe(path), layout)
    first, *named, last = str(raised.value).splitlines()
    assert first == f"{len(bad)} rows are bad, the first ten:"
    lines = [int(text.partition("line ")[2].partition(":")[0]) for text in named]
    assert lines == sorted(bad)[:10]
    assert last == "Mend them, or use --skip-bad-rows"


def test_other_columns_of_a_row_are_its_metadata(tmp_path: Path, layout: RunLayout) -> None:
    others = {"tests": ["f(1) == 2", "f(2) == 3"], "entry_point": "f"}
    rows = [{**good(0), "id": "first", **others}, {**good(1), "metadata": {"level": 3}}]
    path = write_rows(tmp_path / "p.jsonl", [*rows, *map(good, range(2, 5))])
    prepare_prompts(recipe(path, num_held_out=0), layout)
    found = [prompt.metadata for prompt in PromptTable(layout.train_prompts, seed=0).rows()]
    assert found == [others, {"level": 3}, {}, {}, {}]


def test_metadata_of_parquet_is_json_whatever_its_types(tmp_path: Path, layout: RunLayout) -> None:
    dated = {**good(0), "written": date(2024, 5, 1), "sizes": [1, None]}
    pq.write_table(pa.Table.from_pylist([dated, good(1)]), tmp_path / "p.parquet")
    prepare_prompts(recipe(tmp_path / "p.parquet", num_held_out=0), layout)
    first = PromptTable(layout.train_prompts, seed=0).row(0)
    assert first.metadata == {"written": "2024-05-01", "sizes": [1, None]}


def test_missing_empty_and_unknown_files(tmp_path: Path, layout: RunLayout) -> None:
    with pytest.raises(PromptError, match="found none"):
        prepare_prompts(recipe(tmp_path / "absent.jsonl"), layout)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(PromptError, match="is empty"):
        prepare_prompts(recipe(tmp_path / "empty.jsonl"), layout)
    (tmp_path / "p.csv").write_text("question,answer\n")
    with pytest.raises(PromptError, match=r"expected \.jsonl or \.parquet, found \.csv"):
        prepare_prompts(recipe(tmp_path / "p.csv"), layout)
    (tmp_path / "p.parquet").write_text("not parquet")
    with pytest.raises(PromptError, match="not a readable Parquet"):
        prepare_prompts(recipe(tmp_path / "p.parquet"), layout)


def test_parquet_equals_jsonl(tmp_path: Path, layout: RunLayout) -> None:
    rows = [good(index) for index in range(30)]
    write_rows(tmp_path / "p.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    tables = []
    for name in ("p.jsonl", "p.parquet"):
        prepare_prompts(recipe(tmp_path / name), layout)
        table = PromptTable(layout.train_prompts, seed=0)
        tables.append([table.row(i) for i in range(len(table))])
    assert tables[0] == tables[1]


def test_held_out_prompts_are_never_trained_on(tmp_path: Path, layout: RunLayout) -> None:
    rows = [good(index % 12) for index in range(60)]
    prepare_prompts(recipe(write_rows(tmp_path / "p.jsonl", rows)), layout)
    held = PromptTable(layout.held_out_prompts, seed=0).rows()
    train = PromptTable(layout.train_prompts, seed=0).rows()
    assert held
    assert len({p.text for p in held}) == len(held)
    assert not {p.text for p in held} & {p.text for p in train}


def test_every_epoch_shows_every_prompt_once_in_another_order(
    tmp_path: Path, layout: RunLayout
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [good(index) for index in range(50)])
    prepare_prompts(recipe(path), layout)
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
            assert score.verdict == "right"
        assert len(running_sums(text)) == question["difficulty"]
        assert is_chain_of_thought(chain_of_thought_answer(text))
        assert not is_chain_of_thought(direct_answer(text))


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
