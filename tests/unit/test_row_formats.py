"""Formats of rows: each yields the same rows; names of the hub are told from paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.log.dataset import create_dataset
from areal_flow.log.inputs import Verifier, read_inputs, record_inputs
from areal_flow.rollout.prompts.files import read_prompts
from areal_flow.rollout.prompts.formats import HubDataset, hub_dataset, read_rows
from pipelines.arguments import file_of
from pipelines.jobs.built_in import with_fetched_sft, with_files
from pipelines.jobs.evaluate import with_fetched_sets
from tests.plain import plain

ROWS = [
    {"question": "1 +\n1 =", "answer": "007", "note": None},
    {"question": 'say "é"', "answer": "0.10", "note": "x,y"},
    *({"question": f"{n} =", "answer": str(n), "note": None} for n in range(700)),
]
TABLE = pa.Table.from_pylist(ROWS)


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_stream(path: Path) -> None:
    with pa.ipc.new_stream(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE)


def write_splits(path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_jsonl,
    "rows.parquet": lambda path: pq.write_table(TABLE, path),
    "rows.csv": lambda path: pd.DataFrame(ROWS).to_csv(path, index=False),
    "bom.csv": lambda path: pd.DataFrame(ROWS).to_csv(path, index=False, encoding="utf-8-sig"),
    "rows.feather": lambda path: pd.DataFrame(ROWS).to_feather(path),
    "rows.arrow": lambda path: pl.DataFrame(ROWS).write_ipc(path, compression="zstd"),
    "rows.ipc": write_stream,
    "rows.lance": lambda path: create_dataset(path, TABLE.schema, [TABLE]),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=3),
    "splits": write_splits,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_yields_the_same_rows_in_order(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    rows = read_prompts(tmp_path / name, lambda row: row, on_bad=lambda place, error: None)
    read = [
        {"note": None, **{k: v for k, v in row.items() if v == v}} for row in rows
    ]  # pandas: NaN
    assert read == ROWS


@pytest.mark.parametrize("name", ["rows.csv", "rows.arrow", "saved"])
def test_rows_of_a_table_are_named_by_their_number(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    origins = [origin for origin, _ in read_rows(tmp_path / name)]
    if name == "saved":  # by file
        assert origins[0] == f"{tmp_path / name / 'data-00000-of-00003.arrow'}, row 1"
    else:
        assert origins == [f"{tmp_path / name}, row {n}" for n in range(1, len(ROWS) + 1)]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.txt", b"", r"expected a JSONL .*\.csv\) or Arrow .*save_to_disk`, found \.txt"),
        ("rows", b"", "found no suffix"),
        ("rows.csv", b"", "is empty: expected one row or more"),
        ("rows.csv", b"question,answer\n", "is empty: expected one row or more"),
        ("rows.csv", b"question,answer\na,1\nb\n", "CSV file .* Expected 2 columns, got 1: b"),
        ("rows.csv", b"q,a,q\n1,2,3\n", "two columns have the same name"),
        ("rows.csv", b"q,a\n\xff,2\n", "not a readable CSV file with a header: .*UTF8"),
        ("rows.arrow", b"no arrow", "not a readable Arrow file"),
        ("rows.feather", b"", "not a readable Arrow file|is empty"),
        ("state.json", b"{}", "not a readable folder of `datasets.save_to_disk`: '_data_files'"),
        ("dataset_dict.json", b'{"splits": ["test"]}', "expected train: name the folder .*test"),
        ("README.md", b"", "found another folder"),
    ],
)
def test_unreadable_rows_are_refused_by_what_is_wrong(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name if name.startswith("rows") else tmp_path
    with pytest.raises(PromptError, match=expected):
        [*read_rows(path)]


def test_names_of_the_hub_are_told_from_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "local").mkdir(parents=True)
    expected = {
        "openai/gsm8k": HubDataset("openai/gsm8k", None, None),
        "openai/gsm8k:main@train[:100]": HubDataset("openai/gsm8k", "main", "train[:100]"),
        "a-b/c_d.e@test": HubDataset("a-b/c_d.e", None, "test"),
        "data/hub:main": HubDataset("data/hub", "main", None),
        **dict.fromkeys(("data/local", "data/absent", "data/rows.jsonl", "rows", "/a/b", "a/b/c")),
        **dict.fromkeys(("a/rows.csv", "../a", "a/b c")),
    }
    assert {name: hub_dataset(Path(name)) for name in expected} == expected
    rows = tmp_path / "never-written.jsonl"
    assert file_of("openai/gsm8k:main", rows) == Path("openai/gsm8k:main")
    assert file_of("data/local", rows) == tmp_path / "data" / "local"


HUB = {("owner/name", "main", split): [{"q": split}] for split in ("train", "test", "train[:9]")}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        if (rows := HUB.get((name, config or "", split))) is None:
            raise ValueError("Config name is missing.\nmore lines")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.usefixtures("hub")
def test_rows_of_the_hub_are_copied_into_the_run_wherever_a_file_is_named(tmp_path: Path) -> None:
    table = {
        "prompts": {"path": "owner/name:main", "held_out_path": "owner/name:main"},
        "evaluation": {"held_out": [{"name": "nine", "path": "owner/name:main@train[:9]"}]},
        "sft": {"path": "owner/name:main", "num_steps": 1},
    }
    layout, recipe = RunLayout(tmp_path / "run"), build_recipe(table, source="test")
    filled = with_files(recipe, layout)
    paths = (filled.prompts.path, filled.prompts.held_out_path, filled.sft.path)
    read = [json.loads(path.read_text()) for path in paths if path]
    assert read == [{"q": "train"}, {"q": "test"}, {"q": "train"}]
    (nine,) = filled.evaluation.held_out
    assert json.loads(nine.path.read_text()) == {"q": "train[:9]"}
    assert with_fetched_sft(recipe, layout).sft == filled.sft
    sources = [{"name": name, "path": "owner/name:main"} for name in ("a", "b")]
    filled = with_files(build_recipe({"sources": sources}, source="test"), layout)
    assert [each.path and each.path.parent.name for each in filled.sources] == ["a", "b"]
    source = {"prompts": {"source": "datasets:owner/name:main@test"}}
    filled = with_files(build_recipe(source, source="test"), layout)
    assert filled.prompts.path
    assert json.loads(filled.prompts.path.read_text()) == {"q": "test"}
    expected = (
        r"of the hub \(no path here has this name\), config by default, split 'train': Config"
    )
    with pytest.raises(PromptError, match=expected):
        with_files(build_recipe({"prompts": {"path": "owner/name"}}, source="test"), layout)


@pytest.mark.usefixtures("hub")
def test_evaluated_rows_of_the_hub_are_a_set_of_the_name_of_the_dataset(tmp_path: Path) -> None:
    given = ["owner/name:main", "own=owner/name:main@train[:9]", "rows.jsonl"]
    named, own, file = with_fetched_sets(given, tmp_path)
    assert (named, own, file) == (
        f"name={tmp_path}/name.jsonl",
        f"own={tmp_path}/own.jsonl",
        "rows.jsonl",
    )
    assert [(tmp_path / f"{name}.jsonl").read_text() for name in ("name", "own")] == [
        '{"q": "test"}\n',
        '{"q": "train[:9]"}\n',
    ]


def test_files_of_a_folder_of_rows_are_hashed_like_a_file(tmp_path: Path) -> None:
    WRITERS["saved"](tmp_path / "saved")
    layout = RunLayout(tmp_path / "run")
    layout.model.mkdir(parents=True)
    recipe = build_recipe({"prompts": {"path": str(tmp_path / "saved")}}, source="test")
    record_inputs(layout, recipe, verifier=Verifier(), model=layout.model)
    recorded = read_inputs(layout).sources
    assert {*recorded} == {str(path) for path in (tmp_path / "saved").iterdir()}
    assert all(len(each) == 16 for each in recorded.values())


def test_saved_folder_as_a_source_of_datasets_is_refused_with_what_to_set(tmp_path: Path) -> None:
    WRITERS["saved"](tmp_path / "saved")
    recipe = build_recipe({"prompts": {"source": f"datasets:{tmp_path}/saved"}}, source="test")
    with pytest.raises(PromptError, match=r"save_to_disk`: name it as prompts\.path"):
        with_files(recipe, RunLayout(tmp_path / "run"))


def test_dataset_dict_in_memory_is_refused_with_what_to_give(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"question": "q"}])})
    with pytest.raises(ConfigError, match="of a DatasetDict one split"):
        file_of(both, tmp_path / "rows.jsonl")
    path = file_of(both["train"], tmp_path / "rows.jsonl")
    assert plain(json.loads(path.read_text())) == {"question": "q"}
