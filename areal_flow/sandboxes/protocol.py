"""What every sandbox of an episode does, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from areal_flow.core.settings import Settings

Interpreter = Literal["bash", "python"]


class SandboxLimits(Settings):
    """What a sandbox may use until it is closed."""

    memory_bytes: int = Field(2**30, ge=2**26)
    """Of one process, and of all together; files are not counted."""
    disk_bytes: int = Field(2**28, ge=2**20)
    """Of the files that commands write; of a container, of each file."""
    num_processes: int = Field(64, ge=4)
    """How many processes and threads there may be at once."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command printed, and how it ended."""

    output: str
    """Standard output and errors as they came; the middle of a long one is left out."""
    exit_code: int
    """137 if it was killed."""
    duration_s: float
    timed_out: bool = False


class Sandbox(Protocol):
    """A machine of one episode: commands share a shell, an interpreter and files.

    Any method may raise `SandboxError`, an error of the infrastructure: the episode has no result.
    """

    async def start(self) -> None:
        """Make it ready for commands."""

    async def run(
        self, command: str, *, timeout_s: float, interpreter: Interpreter = "bash"
    ) -> CommandResult:
        """Run a command where the last one of its interpreter ended.

        Variables, functions and the working directory stay. A command that takes longer is killed
        with every process of the sandbox; the interpreters then start again.
        """
        ...

    async def stop_processes(self) -> None:
        """End all processes, so that the next command starts anew; files stay."""

    async def read_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: it cannot be read.
        """
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, and the folders it is in.

        Raises:
            FileNotFoundError: it cannot be written.
        """

    async def close(self) -> None:
        """End all processes, and remove all files; also after a failed start."""


@asynccontextmanager
async def opened(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """Start a sandbox, and close it at the end of the block."""
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
