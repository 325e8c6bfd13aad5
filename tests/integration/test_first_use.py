"""The walk of docs/quickstart.md, typed as it stands there, prints what it shows there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ENVIRONMENT
from tests.markdown import DOCS, difference, typed_commands, write_files

pytestmark = pytest.mark.walk

PAGE = DOCS / "quickstart.md"
READERS_FOLDER = "/home/you/sorting"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, with the files that the page shows."""
    cwd = tmp_path_factory.mktemp("quickstart").resolve()
    write_files(PAGE, cwd)
    return cwd


@pytest.mark.parametrize(("command", "expected"), typed_commands(PAGE))
def test_command_prints_what_the_page_shows(folder: Path, command: str, expected: str) -> None:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**ENVIRONMENT, "PATH": scripts},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert not difference(expected, done.stdout.replace(str(folder), READERS_FOLDER))
    assert done.returncode == 0
