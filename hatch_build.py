"""Records the commit of the clone that a wheel or an sdist is built from."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `areal_flow/core/commit.txt`, unless an sdist brought it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root, "areal_flow")
        if version == "editable" or (package / "core" / "commit.txt").exists():
            return
        program = run_path(str(package / "core" / "program.py"))
        if commit := program["git_commit"](package):
            self._folder = TemporaryDirectory()
            recorded = Path(self._folder.name, "commit.txt")
            recorded.write_text(f"{commit}\n")
            build_data["force_include"][str(recorded)] = "areal_flow/core/commit.txt"
