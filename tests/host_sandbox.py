"""A sandbox of one's own, by its import path: processes of this machine, without any limits."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from areal_flow.sandboxes.protocol import SandboxLimits
from areal_flow.sandboxes.run import SandboxError
from areal_flow.sandboxes.shell import Process, ShellSandbox


class HostSandbox(ShellSandbox):
    def __init__(self, limits: SandboxLimits, *, image: str = "", **inside: Any) -> None:
        super().__init__(**inside)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()

    async def close(self) -> None:
        await super().close()
        await self._kill_all()
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    async def _start_process(self, arguments: Sequence[str]) -> Process:
        if self._folder is None:
            raise SandboxError("the sandbox is closed")
        pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, stderr=out,
            cwd=self._workdir or self._folder.name, env={**os.environ, **self._variables},
            start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        return Process(process.stdin, process.stdout, process.stdin.close)

    async def _kill_all(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._processes.clear()
