"""Sandboxes in containers, by the command line of Docker or Podman.

The container's first process ends with its standard input, which the worker holds: a container does
not outlive a worker that is killed.
"""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType

from areal_flow.core.errors import ConfigError
from areal_flow.sandboxes.protocol import SandboxLimits
from areal_flow.sandboxes.run import SandboxError
from areal_flow.sandboxes.shell import Process, ShellSandbox

PROGRAMS = ("docker", "podman")
START_TIMEOUT_S = 600.0
"""Of a container, whose image may have to be fetched."""
END_TIMEOUT_S = 30.0
_BUILDS: dict[tuple[str, str], asyncio.Task[str]] = {}
"""The builds of this process, by program and folder, but those that failed."""
_READY = b"ready\n"
_FIRST_PROCESS = "echo ready; while read -r _; do kill -9 -1; echo ready; done"
"""Kills the others for each line: there may be too many for another to start."""


class ContainerSandbox(ShellSandbox):
    """A container of an image that has bash; its user and working directory are the image's.

    Of the disk limit, only that of a single file holds: which files a container may write in all is
    a setting of Docker's storage.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        image: str = "",
        workdir: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
        program: str = "",
        arguments: Sequence[str] = (),
    ) -> None:
        """Prepare a container.

        Args:
            program: by default the one of `PROGRAMS` that is installed.
            arguments: further ones of its command `run`, `--network=bridge` for example.
        """
        super().__init__(workdir=workdir, variables=variables)
        if not image:
            raise ConfigError("sandbox.image: the provider 'docker' needs an image that has bash")
        if Path(image).is_absolute() and not Path(image, "Dockerfile").is_file():
            raise ConfigError(f"sandbox.image = {image!r}: expected a folder with a Dockerfile")
        self._limits, self._image, self._arguments = limits, image, arguments
        self._name = f"areal-flow-{token_hex(8)}"
        self._program = program or next(filter(shutil.which, PROGRAMS), "")
        self._container: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if not self._program:
            raise SandboxError(
                f"the provider 'docker' needs one of {', '.join(PROGRAMS)}, found neither: install "
                "one on the reward workers, or use 'local'"
            )
        if Path(self._image).is_absolute():
            self._image = await self._built(self._image)
        self._container = await self._command(*self._run_arguments(), stderr=PIPE)
        await self._wait_until_ready(START_TIMEOUT_S)

    async def close(self) -> None:
        await super().close()
        if (container := self._container) is None:
            return
        self._container = None
        assert container.stdin is not None
        container.stdin.close()
        killer = await self._command("kill", self._name)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.gather(killer.wait(), container.wait())
        except TimeoutError:
            with suppress(ProcessLookupError):
                container.kill()

    async def _built(self, folder: str) -> str:
        """Return the image of a folder's Dockerfile, built once by each process."""
        key = self._program, folder

        def keep_if_built(build: asyncio.Task[str]) -> None:
            if build.cancelled() or build.exception():
                del _BUILDS[key]

        if key not in _BUILDS:
            _BUILDS[key] = asyncio.create_task(self._build(folder))
            _BUILDS[key].add_done_callback(keep_if_built)
        return await asyncio.shield(_BUILDS[key])  # other members of the group may wait for it

    async def _build(self, folder: str) -> str:
        build = await self._command("build", "--quiet", folder, stderr=PIPE)
        try:
            output, errors = await asyncio.wait_for(build.communicate(), START_TIMEOUT_S)
        except TimeoutError:
            output, errors = b"", f"not done within {START_TIMEOUT_S:g} s".encode()
        finally:
            with suppress(ProcessLookupError):  # it goes on after a timeout or a cancellation
                build.kill()
        if build.returncode != 0:
            reason = errors.decode(errors="replace").strip()[-2000:]
            raise SandboxError(f"{self._program} build {folder}: {reason}")
        return output.decode().split()[-1]

    def _run_arguments(self) -> list[str]:
        limits = self._limits
        has_network = any(each.startswith("--network") for each in self._arguments)
        return [
            *("run", "--rm", "--interactive", "--name", self._name),
            *([] if has_network else ["--network=none"]),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.num_processes)),
            *("--ulimit", f"fsize={limits.disk_bytes}", "--security-opt", "no-new-privileges"),
            *([f"--workdir={self._workdir}"] if self._workdir else []),
            *self._arguments,
            *("--entrypoint", "bash", self._image, "-c", _FIRST_PROCESS),
        ]

    async def _start_process(self, arguments: Sequence[str]) -> Process:
        variables = [f"--env={name}={value}" for name, value in self._variables.items()]
        process = await self._command("exec", "--interactive", *variables, self._name, *arguments)
        assert process.stdin is not None
        assert process.stdout is not None

        def close() -> None:
            with suppress(ProcessLookupError):
                process.kill()

        return Process(process.stdin, process.stdout, close)

    async def _kill_all(self) -> None:
        if self._container and self._container.stdin:
            with suppress(ConnectionError):
                self._container.stdin.write(b"\n")
            await self._wait_until_ready(END_TIMEOUT_S)

    async def _wait_until_ready(self, timeout_s: float) -> None:
        assert self._container is not None
        stdout, stderr = self._container.stdout, self._container.stderr
        assert stdout is not None
        assert stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                if await stdout.readline() != _READY:
                    reason = (await stderr.read()).decode(errors="replace").strip()
                    raise SandboxError(f"{self._program}: a container of {self._image}: {reason}")
        except (TimeoutError, ValueError):  # the latter from a line without an end
            raise SandboxError(
                f"{self._program}: a container of {self._image} is not ready after {timeout_s:g} s"
            ) from None

    async def _command(self, *arguments: str, stderr: int = STDOUT) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self._program, *arguments, stdin=PIPE, stdout=PIPE, stderr=stderr
            )
        except OSError as error:
            raise SandboxError(f"{self._program} cannot be started: {error}") from error
