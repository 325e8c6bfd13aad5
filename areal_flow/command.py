"""Writes a command as a user can type it here: the one place that knows what it must name."""

from __future__ import annotations

import shlex
from pathlib import Path


def command(*words: object, runs: Path) -> str:
    """Return `areal-flow WORDS`, with the folder of runs unless it is the default one."""
    folder = from_here(runs)
    options = () if folder == Path("runs") else ("--runs", folder)
    return shlex.join(["areal-flow", *map(str, (*words, *options))])


def from_here(path: Path) -> Path:
    """Return a path as it is shortest to type: relative if it lies in the working directory."""
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
