"""What the Python API accepts: rows of every kind, settings by keyword; all without a cluster."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import areal_flow
import pipelines.api
from areal_flow.config import Recipe
from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout
from areal_flow.recovery.run_directory import write_identity
from pipelines.api import rows_of
from pipelines.jobs import Job
from pipelines.stop_signals import Outcome, StopSignals, wait_for

ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "difficulty": n} for n in range(3)]


class HuggingFace:
    """The part of a `datasets.Dataset` that counts here."""

    def to_list(self) -> list[dict[str, Any]]:
        return ROWS


@pytest.mark.parametrize(
    "table",
    [
        *(ROWS, iter(ROWS), pd.DataFrame(ROWS), pl.DataFrame(ROWS)),
        *(pa.Table.from_pylist(ROWS), HuggingFace()),
    ],
    ids=["dicts", "iterator", "pandas", "polars", "arrow", "hugging face"],
)
def test_rows_of_every_kind_of_table(table: Any) -> None:
    assert list(rows_of(table)) == ROWS


def test_numpy_values_become_plain_ones() -> None:
    rows = [{"question": "q", "difficulty": np.int64(2), "tests": np.array([1, 2])}]
    assert list(rows_of(rows)) == [{"question": "q", "difficulty": 2, "tests": [1, 2]}]


def test_messages_and_answers_of_every_table_keep_their_types() -> None:
    messages = [{"role": "user", "content": "1 + 1 ="}]
    rows = [
        {"messages": messages, "answer": [1, 2], "level": 0.5, "seen": True},
        {"messages": messages * 3, "answer": [], "level": None, "seen": False},
    ]
    tables = rows, pd.DataFrame(rows), pl.DataFrame(rows), pa.Table.from_pylist(rows)
    for table in tables:
        assert list(rows_of(table)) == rows


def test_what_is_missing_in_pandas_is_null() -> None:
    table = pd.DataFrame({"a": [1.5, None], "b": pd.array([1, None], "Int64"), "c": ["x", None]})
    table["d"] = pd.to_datetime(["2024-05-01", None])
    first, second = rows_of(table)
    assert first == {"a": 1.5, "b": 1, "c": "x", "d": "2024-05-01 00:00:00"}
    assert set(second.values()) == {None}


@pytest.mark.parametrize("wrong", [5, {"question": "q"}, [1, 2], "text"])
def test_what_is_no_table_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        list(rows_of(wrong))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, RunLayout, Recipe]]:
    """Collects what would have been started, with the run's files written."""
    found: list[tuple[str, RunLayout, Recipe]] = []

    def start(job: Job, layout: RunLayout, recipe: Recipe, *, fill: Any, **_: Any) -> Outcome:
        layout.root.mkdir(parents=True)
        write_identity(layout)
        layout.config.write_text("")
        found.append((job.command, layout, fill(layout, recipe)))
        return Outcome(True)

    monkeypatch.setattr(pipelines.api, "start", start)
    monkeypatch.chdir(tmp_path)
    return found


def test_settings_by_keyword_and_by_dotted_name(started: list[Any]) -> None:
    dotted = {"controller.max_staleness": 1}
    run = areal_flow.train(
        prompts=ROWS, name="n", num_steps=20, trainer={"learning_rate": 1e-5}, **dotted
    )
    ((command, layout, recipe),) = started
    assert (command, run.layout) == ("train", layout)
    assert layout.root == Path("runs/n").resolve()
    assert (recipe.num_steps, recipe.trainer.learning_rate) == (20, 1e-5)
    assert recipe.controller.max_staleness == 1
    assert recipe.prompts.source == "file"
    assert [row["answer"] for row in rows_of_file(recipe.prompts.path)] == ["1", "2", "3"]


def rows_of_file(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return pd.read_json(path, lines=True, dtype=False).to_dict("records")


def test_recipe_may_be_a_path_or_an_object_and_prompts_a_path(
    started: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("num_steps = 3\nseed = 5\n")
    areal_flow.train("mine.toml", prompts="p.jsonl", model=tmp_path / "model", num_steps=4)
    areal_flow.train(Recipe(seed=6), name="object")
    (_, layout, by_path), (_, _, by_object) = started
    assert layout.name.startswith("mine-")
    assert (by_path.num_steps, by_path.seed) == (4, 5)
    assert by_path.model == str(tmp_path / "model")
    assert by_path.prompts.path == (tmp_path / "p.jsonl").resolve()
    assert by_object.seed == 6


def test_nothing_but_a_call_is_the_default_job(started: list[Any]) -> None:
    areal_flow.train()
    ((_, layout, recipe),) = started
    assert layout.name.startswith("arithmetic-")
    assert (recipe.num_steps, recipe.sft.num_steps) == (60, 2300)


def test_wrong_setting_is_named(started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lr: there is no such setting"):
        areal_flow.train(prompts=ROWS, trainer={"lr": 1})
    assert not started


async def test_work_is_waited_for_on_a_running_event_loop() -> None:
    async def work() -> tuple[bool, int]:
        with StopSignals():  # Python would refuse to handle signals in this thread
            await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread(), 7

    assert wait_for(work) == (False, 7)
