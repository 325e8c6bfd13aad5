"""An id names one prompt of a run, whatever its rows, files and sources call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Prompt
from areal_flow.rollout.prompts.prepare import prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

Rows = list[dict[str, Any]]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    write_tiny_model(made.model, max_model_len=96)
    return made


def numbered(size: int, *, term: int = 1, first: int = 0) -> Rows:
    return [
        {"id": n, "question": f"{n} + {term} =", "answer": str(n + term)}
        for n in range(first, first + size)
    ]


def jsonl(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(layout: RunLayout, prompts: dict[str, Any], **tables: Any) -> list[list[Prompt]]:
    """Return the prompts to train on and the held-out ones."""
    generation = {"max_model_len": 96, "max_new_tokens": 32}
    given = {"num_held_out": 0, "source": "file", **prompts}
    recipe = build_recipe({"prompts": given, "generation": generation, **tables}, source="test")
    prepare_prompts(recipe.prompt_plan(), layout)
    tables = (layout.train_prompts, layout.held_out_prompts)
    return [PromptTable(path, seed=0).rows() if has_rows(path) else [] for path in tables]


def has_rows(path: Path) -> bool:
    return len(pa.ipc.open_file(path.read_bytes()).read_all()) > 0


def ids(prompts: list[Prompt]) -> set[str]:
    return {prompt.prompt_id for prompt in prompts}


def test_duplicate_prompt_id_is_refused_with_both_rows_or_skipped(
    tmp_path: Path, layout: RunLayout
) -> None:
    rows = numbered(12)
    rows.insert(7, {"id": 3, "question": "9 + 9 =", "answer": "18"})
    path = jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(PromptError) as raised:
        prepared(layout, {"path": path})
    message = str(raised.value)
    assert f"{path}, line 8: duplicate id '3': a different row at {path}, line 4 has it" in message
    train, _ = prepared(layout, {"path": path, "skip_bad_rows": True})
    assert (len(train), len(ids(train))) == (12, 12)
    assert "line 8" in layout.bad_rows.read_text()


def test_held_out_row_and_row_to_train_on_of_one_file_share_no_id(
    tmp_path: Path, layout: RunLayout
) -> None:
    rows = numbered(10) + numbered(10, term=2)
    path = jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(PromptError, match="10 rows are bad"):
        prepared(layout, {"path": path, "num_held_out": 4})


def test_equal_rows_may_repeat_their_id(tmp_path: Path, layout: RunLayout) -> None:
    train, _ = prepared(layout, {"path": jsonl(tmp_path / "p.jsonl", numbered(5) * 3)})
    assert (len(train), ids(train)) == (15, {"0", "1", "2", "3", "4"})


def test_id_of_zero_stays_and_rows_without_ids_are_distinguished_by_content(
    tmp_path: Path, layout: RunLayout
) -> None:
    question = {"question": "1 + 1 ="}
    rows = [
        {"id": 0, "question": "0 + 0 =", "answer": "0", "difficulty": None},
        {**question, "answer": "2", "id": None},
        {**question, "answer": "2", "id": None},
        {**question, "answer": "3"},
        {**question, "answer": "2", "kind": "sum"},
    ]
    train, _ = prepared(layout, {"path": jsonl(tmp_path / "p.jsonl", rows)})
    first, second, repeated, *others = [prompt.prompt_id for prompt in train]
    assert first == "0"
    assert train[0].difficulty == 0
    assert second == repeated
    assert len({first, second, *others}) == 4


def test_files_that_number_their_rows_alike_have_ids_of_their_own(
    tmp_path: Path, layout: RunLayout
) -> None:
    files = [jsonl(tmp_path / f"{n}.jsonl", numbered(6, term=n)) for n in range(4)]
    train, held_out = prepared(
        layout,
        {"path": files[0], "held_out_path": files[1], "num_held_out": 6},
        evaluation={"held_out": [{"name": "hard", "path": files[2]}]},
    )
    assert ids(train) == {str(n) for n in range(6)}
    assert ids(held_out) == {f"{name}/{n}" for name in ("held_out", "hard") for n in range(6)}
    sources = [{"name": f"s{n}", "path": files[n]} for n in (0, 1)]
    train, _ = prepared(layout, {"source": "arithmetic"}, sources=sources)
    assert ids(train) == {f"{name}/{n}" for name in ("s0", "s1") for n in range(6)}


def test_line_that_is_no_row_is_refused_as_before(tmp_path: Path, layout: RunLayout) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 1\n' + json.dumps(numbered(1)[0]) + "\n")
    with pytest.raises(PromptError, match="line 1: not valid JSON"):
        prepared(layout, {"path": str(path)})


def test_nulls_of_pandas_are_unset(tmp_path: Path, layout: RunLayout) -> None:
    rows = [
        {"question": f"{n} + 1 =", "answer": f"{n + 1}", "difficulty": n or None, "score": None}
        for n in range(3)
    ]
    table = pd.DataFrame(rows).astype({"difficulty": float, "score": float})
    table["id"], table["scores"] = [float("nan")] * 3, [[0.5, float("nan")]] * 3
    table.to_parquet(tmp_path / "p.parquet")
    train, _ = prepared(layout, {"path": str(tmp_path / "p.parquet")})
    assert [prompt.difficulty for prompt in train] == [0, 1, 2]
    assert "nan" not in ids(train)
    columns = dict(train[0].metadata)
    assert (columns["score"], columns["scores"]) == (None, [0.5, None])
    table["score"] = float("inf")
    table.to_parquet(tmp_path / "p.parquet")
    with pytest.raises(PromptError, match=r"row 1: field 'score': expected a finite number"):
        prepared(layout, {"path": str(tmp_path / "p.parquet")})
