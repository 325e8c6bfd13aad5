"""Each tutorial, typed as it stands there, prints what it shows there; all read one small run.

Commands run in this process where possible. What starts a cluster is a walk, as is all after it.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_flow.run.layout import RunLayout
from pipelines.cli.main import main
from tests.integration.runs import ENVIRONMENT
from tests.markdown import DOCS, difference, typed_commands, write_files

PAGES = sorted((DOCS / "tutorials").glob("*.md"))
SHELL = "|;>"
"""A command that has one of these needs a shell."""


def commands_of_all_pages() -> list[Any]:
    """Return commands with outputs; from the first of a page that starts a cluster, as a walk."""
    found = []
    for page in PAGES:
        marks: list[pytest.MarkDecorator] = []
        for command, expected in typed_commands(page):
            if {"train", "evaluate"} & {*command.split()} and "exit code" not in command:
                marks = [pytest.mark.walk]
            name = f"{page.stem}: {command}"
            found.append(pytest.param(command, expected, id=name, marks=marks))
    return found


@pytest.fixture(scope="module")
def folder(finished: RunLayout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's folder: the finished run, and the files that all tutorials show."""
    cwd = tmp_path_factory.mktemp("tutorials").resolve()
    shutil.copytree(finished.root, cwd / "runs" / "sums")
    for page in PAGES:
        write_files(page, cwd)
    modules = {*sys.modules}
    yield cwd
    for name in {*sys.modules} - modules:
        if str(cwd) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.parametrize(("command", "expected"), commands_of_all_pages())
def test_command_of_a_tutorial_prints_what_it_shows(
    folder: Path,
    command: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    program, *arguments = shlex.split(command)
    if set(command) & set(SHELL) or "train" in arguments:
        found = typed_in_a_shell(command, folder)
    elif program == "python":
        capsys.readouterr()
        runpy.run_path(arguments[0], run_name="__main__")
        found = capsys.readouterr().out
    else:
        capsys.readouterr()
        code = main(arguments)
        found = "".join(reversed(capsys.readouterr()))
        assert (code == 0) != found.startswith("areal-flow: "), found
    assert not difference(expected, found)


def typed_in_a_shell(command: str, folder: Path) -> str:
    """Return what a command prints in a process of its own, once it ended well."""
    path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**ENVIRONMENT, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorials_are_short_and_show_no_python_that_is_not_run(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 600
    assert text.count("```python\n# ") == text.count("```python")
    assert len(typed_commands(page)) >= 2
