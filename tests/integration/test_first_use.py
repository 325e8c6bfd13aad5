"""The walk of docs/quickstart.md, typed as it stands there, prints what it shows there.

A number, a time or a hash of the page stands for any other; three dots stand for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from calendar import month_abbr
from doctest import ELLIPSIS, Example, OutputChecker
from pathlib import Path

import pytest

from tests.integration.runs import ENVIRONMENT

pytestmark = pytest.mark.walk

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
READERS_FOLDER = "/home/you/sorting"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+\.\w+)\n")
COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
ALIKE = (
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"), "0"),
    (re.compile(r"-?\d(?:[\d,.:-]*\d)?(?:e-?\d+)?"), "0"),
    (re.compile(rf"\b(?:{'|'.join(month_abbr[1:])})\b"), "Nov"),
    (re.compile(r"\[0\]"), "0"),
    (re.compile(r"[█ ─]+"), " "),
    (re.compile(r"0(?: 0)+"), "0"),
)
"""What differs from run to run and from machine to machine, and what stands for all of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, with the files that the page shows."""
    cwd = tmp_path_factory.mktemp("quickstart").resolve()
    for _, text in BLOCK.findall(PAGE.read_text()):
        if named := FILE_NAME.match(text):
            (cwd / named[1]).write_text(text)
    return cwd


def typed_commands() -> list[tuple[str, str]]:
    """Return each command of the page with what it is to print."""
    shown = (text for language, text in BLOCK.findall(PAGE.read_text()) if language == "console")
    return [command for text in shown for command in COMMAND.findall(text)]


@pytest.mark.parametrize(("command", "expected"), typed_commands())
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
    maybe_no_line = re.sub(r"^\.\.\.\n *", "...", expected, flags=re.MULTILINE)
    wanted, found = alike(maybe_no_line), alike(done.stdout.replace(str(folder), READERS_FOLDER))
    checker = OutputChecker()
    difference = checker.output_difference(Example(command, wanted), found, ELLIPSIS)
    assert checker.check_output(wanted, found, ELLIPSIS), difference
    assert done.returncode == 0


def alike(text: str) -> str:
    """Return a text as it would be with other numbers, in columns of another width."""
    for pattern, common in ALIKE:
        text = pattern.sub(common, text)
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())
