"""The commands of the quickstart and the tutorials print what the pages show.

Commands run in this process where possible. All tutorials read one small run. What starts a
cluster is a walk, as are the script that it needs and all after these.
"""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.core.layout import RunLayout
from pipelines.cli.main import main
from tests.chat_templates import CHATML, give_chat_template
from tests.integration.runs import typed_in_a_shell
from tests.markdown import DOCS, difference, typed_commands, write_files
from tests.policies import write_model_directory

QUICKSTART = DOCS / "quickstart.md"
LAPTOP = DOCS / "tutorials" / "laptop.md"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
READERS_FOLDER = "/home/you/sorting"
GSM8K = DOCS.parent / "tests" / "data" / "gsm8k" / "sample.jsonl"
OF_A_REAL_TASK = tuple(DOCS / "tutorials" / f"{n}.md" for n in ("gsm8k", "from_trl", "from_verl"))
SMALL = {
    "Qwen/Qwen2.5-0.5B-Instruct": "chat-model",
    "openai/gsm8k:main@train": "train.jsonl",
    "openai/gsm8k:main@test": "test.jsonl",
    "num_steps=200": "num_steps=2",
    "num_steps = 467": "num_steps = 2",
    "group_size=8": "group_size=4",
    "batch_size=64": "batch_size=8",
    "batch_size = 128": "batch_size = 16",
    "max_new_tokens=512": "max_new_tokens=16",
    "max_new_tokens = 512": "max_new_tokens = 16",
}
"""What stands for the real task of these pages: a small model and a part of the data."""
SMALL_RUNS = {
    LAPTOP: " --num-steps 2 --prompts.num-held-out 8",
    DOCS / "tutorials" / "gsm8k.md": (
        " --model chat-model --num-steps 2 --prompts.num-held-out 8 --controller.batch-size 16"
        " --generation.max-new-tokens 16 --generation.engine torch --generation.device cpu"
        " --generation.dtype float32 --generation.vllm.gpu-memory-utilization 0.9"
        " --trainer.device cpu --trainer.dtype float32"
    ),
}


def starts_cluster(command: str) -> bool:
    return bool({"train", "evaluate"} & {*command.split()}) and "exit code" not in command


def commands_of_all_pages() -> list[Any]:
    parameters = []
    for page in (QUICKSTART, *TUTORIALS):
        marks: list[Any] = []
        typed = [*typed_commands(page)]
        starts = [place for place, (command, _) in enumerate(typed) if starts_cluster(command)]
        for place, (command, expected) in enumerate(typed):
            is_needed = command.startswith("python ") and any(start > place for start in starts)
            if page in (QUICKSTART, *OF_A_REAL_TASK) or place in starts or is_needed:
                marks = [pytest.mark.walk]
            name = f"{page.stem}: {command}"
            parameters.append(pytest.param(page, command, expected, id=name, marks=marks))
    return parameters


@pytest.fixture(scope="module")
def folder_of(
    finished: RunLayout, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Path], Path]]:
    """Return a reader's folder for a page: its files and, for tutorials, the finished run."""
    base = tmp_path_factory.mktemp("pages").resolve()

    @cache
    def folder_of(page: Path) -> Path:
        folder = base / page.stem
        if page != QUICKSTART:
            shutil.copytree(finished.root, folder / "runs" / "sums")
        write_files(page, folder)
        if page in OF_A_REAL_TASK:
            write_small_task(folder)
        return folder

    yield folder_of
    for name, module in [*sys.modules.items()]:
        if str(base) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def write_small_task(folder: Path) -> None:
    """Write a small model and some of GSM8K; let the page's files name them."""
    for file in (each for each in folder.iterdir() if each.is_file()):
        file.write_text(small(file.read_text()))
    give_chat_template(write_model_directory(folder / "chat-model"), CHATML)
    lines = GSM8K.read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:96]))
    (folder / "test.jsonl").write_text("".join(lines[96:128]))
    (folder / "gsm8k").mkdir()
    for split, chosen in (("train", lines[:96]), ("test", lines[96:128])):
        rows = [json.loads(line) for line in chosen]
        table = pa.Table.from_pylist([verl_row(split, *each) for each in enumerate(rows)])
        pq.write_table(table, folder / "gsm8k" / f"{split}.parquet")


def verl_row(split: str, index: int, row: dict[str, str]) -> dict[str, Any]:
    """Return a row as verl's preprocessing of GSM8K makes it."""
    right = row["answer"].rpartition("#### ")[2]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": right},
        "extra_info": {"split": split, "index": index},
    }


def small(text: str) -> str:
    for real, little in SMALL.items():
        text = text.replace(real, little)
    return text


@pytest.mark.parametrize(("page", "command", "expected"), commands_of_all_pages())
def test_command_prints_what_the_page_shows(
    folder_of: Callable[[Path], Path],
    page: Path,
    command: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(page)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    command = small(command)
    program, *arguments = shlex.split(command)
    if page in SMALL_RUNS and "train" in arguments and "--resume" not in arguments:
        command += SMALL_RUNS[page]
    capsys.readouterr()
    if set(command) & set("|;>") or {"train", "-m"} & {*arguments}:
        output = typed_in_a_shell(command, cwd=folder)
    elif program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        output = capsys.readouterr().out
    else:
        code = main(arguments)
        output = "".join(reversed(capsys.readouterr()))
        assert (code == 0) != output.startswith("areal-flow: "), output
    assert not difference(expected, output.replace(str(folder), READERS_FOLDER))


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_is_short_and_all_its_python_is_run(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 600
    assert text.count("```python\n# ") == text.count("```python")
