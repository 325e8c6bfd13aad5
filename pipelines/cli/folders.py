"""Where every command looks for runs and models: the options that all commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True, slots=True)
class Folders:
    """The folder of runs and MLflow's address, for commands; never an option of a command."""

    runs: Path
    registry: str | None
    began: float
    """`monotonic()` when the program began."""


Given = Annotated[Folders, Parameter(parse=False)]
