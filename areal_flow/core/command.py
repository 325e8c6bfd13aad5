"""Writes commands as a user can type them in this environment."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "areal-flow"


def command(*words: object, runs: Path) -> str:
    """Return `areal-flow WORDS`, with the folder of runs unless it is the default one."""
    folder = from_here(runs)
    options = () if folder == Path("runs") else ("--runs", folder)
    return shlex.join([*_program(), *map(str, (*words, *options))])


def python(statements: str) -> str:
    is_found = shutil.which("python") == str(Path(sys.executable).with_name("python"))
    return shlex.join(["python" if is_found else sys.executable, "-c", statements])


def _program() -> list[str]:
    """Return how this program is started: by its name only where PATH leads to it."""
    typed = Path(sys.argv[0]).absolute()
    script = typed if typed.name == NAME else Path(sys.executable).with_name(NAME)
    if shutil.which(NAME) == str(script):
        return [NAME]
    return [str(script)] if script.is_file() else [sys.executable, "-m", "areal_flow"]


def from_here(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
