"""Which code runs: the version of this package, the commit of a clone, how more is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

VERSION = "0.1.0"
CODE_VERSION = f"areal-flow {VERSION}"
_PACKAGE = Path(__file__).parent.parent
_GIT_TIMEOUT_S = 10.0


def how_to_install(extra: str) -> str:
    return (
        f"pip install '.[{extra}]' in a clone of areal-flow, or "
        f"pip install 'areal-flow[{extra}] @ git+URL' with the address of the repository"
    )


def git_commit(directory: Path = _PACKAGE) -> str:
    """Return the commit that a clone of the package has, with `-dirty` if it was changed since."""
    described = _git(directory, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described if _git(directory, "ls-files", "--", "*.py") else ""


def _git(directory: Path, *arguments: str) -> str:
    command = ("git", "-C", str(directory), *arguments)
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
