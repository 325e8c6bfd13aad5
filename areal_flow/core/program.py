"""This program: its version and commit, how to install more of it, and its commands as users type
them in this environment."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "areal-flow"
VERSION = "0.1.0"
CODE_VERSION = f"areal-flow {VERSION}"
_PACKAGE = Path(__file__).parent.parent
_RECORDED_COMMIT = Path("core", "commit.txt")
"""In a package that was built: the commit of the clone that it was built in."""
_GIT_TIMEOUT_S = 10.0


def how_to_install(extra: str) -> str:
    return (
        f"pip install '.[{extra}]' in a clone of areal-flow, or "
        f"pip install 'areal-flow[{extra}] @ git+URL' with the address of the repository"
    )


def git_commit(directory: Path = _PACKAGE) -> str:
    """Return the commit of a package, with `-dirty` if its clone was changed since.

    It is that recorded at build time, or else that of the clone.
    """
    if (recorded := directory / _RECORDED_COMMIT).is_file():
        return recorded.read_text().strip()
    described = _git(directory, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described if _git(directory, "ls-files", "--", "*.py") else ""


def _git(directory: Path, *arguments: str) -> str:
    command = ("git", "-C", str(directory), *arguments)
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


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
