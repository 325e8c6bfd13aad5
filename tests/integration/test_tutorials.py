"""The commands of the quickstart and the tutorials print what the pages show.

Commands run in this process where possible. All tutorials read one small run. What starts a
cluster is a walk, as are the script that it needs and all after these.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.layout import RunLayout
from pipelines.cli.main import main
from tests.integration.runs import typed_in_a_shell
from tests.markdown import DOCS, difference, typed_commands, write_files

QUICKSTART = DOCS / "quickstart.md"
LAPTOP = DOCS / "tutorials" / "laptop.md"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
READERS_FOLDER = "/home/you/sorting"


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
            if page == QUICKSTART or place in starts or is_needed:
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
        if page != QUICKSTART:
            shutil.copytree(finished.root, base / page.stem / "runs" / "sums")
        write_files(page, base / page.stem)
        return base / page.stem

    yield folder_of
    for name, module in [*sys.modules.items()]:
        if str(base) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


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
    program, *arguments = shlex.split(command)
    if page == LAPTOP and "train" in arguments:
        command += " --num-steps 2 --prompts.num-held-out 8"
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
