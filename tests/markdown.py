"""Blocks of code in a page of Markdown: files, commands, and what the page says they print.

A block that begins with `# NAME.SUFFIX` is a file of that name. In a block of `console`, a line
that begins with `$` is a command; what follows it is its output, in which a number, a time or a
hash stands for any other, and three dots for anything.
"""

from __future__ import annotations

import re
from calendar import month_abbr
from doctest import ELLIPSIS, Example, OutputChecker
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\S+\.\w+)\n")
_COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_ALIKE = (
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"), "0"),
    (re.compile(r"-?\d(?:[\d,.:-]*\d)?(?:e-?\d+)?"), "0"),
    (re.compile(rf"\b(?:{'|'.join(month_abbr[1:])})\b"), "Nov"),
    (re.compile(r"\[0\]"), "0"),
    (re.compile(r"[█ ─]+"), " "),
    (re.compile(r"0(?: 0)+"), "0"),
)
"""What differs from run to run and from machine to machine, and what stands for all of it."""


def blocks(text: str, language: str) -> list[str]:
    return [block for block_language, block in _BLOCK.findall(text) if block_language == language]


def named_files(page: Path) -> dict[str, str]:
    matches = [(_FILE_NAME.match(text), text) for _, text in _BLOCK.findall(page.read_text())]
    return {named[1]: text for named, text in matches if named}


def write_files(page: Path, folder: Path) -> None:
    for name, text in named_files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def typed_commands(page: Path) -> list[tuple[str, str]]:
    shown = blocks(page.read_text(), "console")
    return [command for text in shown for command in _COMMAND.findall(text)]


def difference(expected: str, actual: str) -> str:
    """Return the difference between an output and a page; empty if there is none."""
    maybe_no_line = re.sub(r"^\.\.\.\n *", "...", expected, flags=re.MULTILINE)
    expected_text, got = _alike(maybe_no_line), _alike(actual)
    checker = OutputChecker()
    if checker.check_output(expected_text, got, ELLIPSIS):
        return ""
    return checker.output_difference(Example("", expected_text), got, ELLIPSIS)


def _alike(text: str) -> str:
    for pattern, common in _ALIKE:
        text = pattern.sub(common, text)
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())
