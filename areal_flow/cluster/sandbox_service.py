"""Sandboxes of reward workers, which episodes on generators use over a connection each.

A sandbox ends with its connection, and so with its episode, generator or reward worker.

| who        | waits for                              | unblocked by                       |
|------------|----------------------------------------|------------------------------------|
| an episode | a sandbox, where `MAX_LIVE` are in use | the end of another episode         |
|            | a command                              | its end or limit; a lost worker    |
| a sandbox  | its episode's next command             | it; the end of the connection      |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from distributed import Worker
from distributed.comm import Comm, connect
from distributed.core import Status

from areal_flow.core.errors import ArealFlowError, ConfigError
from areal_flow.sandboxes.protocol import CommandResult, Interpreter
from areal_flow.sandboxes.registry import SandboxSettings, make_sandbox
from areal_flow.sandboxes.run import SandboxError
from areal_flow.sandboxes.shell import FILE_TIMEOUT_S

logger = logging.getLogger(__name__)

OPERATION = "areal_flow_sandbox"
MAX_LIVE = 64
"""Sandboxes that a reward worker has at once."""
GRACE_S = 60.0
"""How long an answer may take beyond a command's time limit."""
_RAISED = {kind.__name__: kind for kind in (ConfigError, FileNotFoundError)}
"""What an episode gets as it was raised; any other error is a `SandboxError` there."""


class SandboxService:
    """The sandboxes of a reward worker."""

    def __init__(self, max_live: int = MAX_LIVE) -> None:
        self._max_live = max_live
        self._num_live, self._ended = 0, asyncio.Condition()

    async def serve(self, comm: Comm, settings: str) -> Status:
        """Serve one sandbox until the other side is gone: a handler of a Dask worker."""
        requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def read() -> None:
            while True:
                requests.put_nowait(await comm.read())

        serving = asyncio.create_task(self._serve(settings, requests.get, comm.write))
        reading = asyncio.create_task(read())
        try:
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            reading.cancel()
            await asyncio.gather(serving, reading, return_exceptions=True)
            comm.abort()
        return Status.dont_reply

    async def _serve(
        self,
        settings: str,
        next_request: Callable[[], Awaitable[dict[str, Any]]],
        answer: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_live < self._max_live)
            self._num_live += 1
        try:
            sandbox = make_sandbox(SandboxSettings.model_validate_json(settings))
            try:
                await answer(await _outcome(sandbox.start))
                while True:
                    request = await next_request()
                    await answer(await _outcome(getattr(sandbox, request.pop("method")), request))
            finally:
                await sandbox.close()
        except Exception as error:  # noqa: BLE001 - a provider may raise anything
            await answer(_as_message(error))
        finally:
            async with self._ended:
                self._num_live -= 1
                self._ended.notify()


async def _outcome(
    method: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        result = await method(**arguments or {})
    except Exception as error:  # noqa: BLE001 - the episode gets it
        return _as_message(error)
    return {"result": asdict(result) if isinstance(result, CommandResult) else result}


def _as_message(error: Exception) -> dict[str, Any]:
    if not isinstance(error, ArealFlowError | OSError):
        logger.error("a sandbox failed", exc_info=error)
    is_ours = isinstance(error, ArealFlowError | FileNotFoundError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"error": type(error).__name__, "message": message}


class RemoteSandbox:
    """A sandbox on a reward worker."""

    def __init__(self, worker: Worker, address: str, settings: SandboxSettings) -> None:
        """Prepare a sandbox.

        Args:
            worker: the one that this runs on.
            address: of the reward worker.
        """
        self._worker, self._address, self._settings = worker, address, settings
        self._comm: Comm | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        try:
            self._comm = await connect(self._address, **self._worker.connection_args)
            settings = self._settings.model_dump_json()
            await self._comm.write({"op": OPERATION, "settings": settings, "reply": False})
        except OSError as error:
            raise SandboxError(f"no connection to {self._address}: {error}") from error
        await self._answer(None)

    async def run(
        self, command: str, *, timeout_s: float, interpreter: Interpreter = "bash"
    ) -> CommandResult:
        request = {"command": command, "timeout_s": timeout_s, "interpreter": interpreter}
        return CommandResult(**await self._ask("run", timeout_s + GRACE_S, request))

    async def stop_processes(self) -> None:
        await self._ask("stop_processes", GRACE_S, {})

    async def read_file(self, path: str) -> bytes:
        return bytes(await self._ask("read_file", FILE_TIMEOUT_S + GRACE_S, {"path": path}))

    async def write_file(self, path: str, content: bytes) -> None:
        request = {"path": path, "content": content}
        await self._ask("write_file", FILE_TIMEOUT_S + GRACE_S, request)

    async def close(self) -> None:
        if self._comm:
            self._comm.abort()

    async def _ask(self, method: str, timeout_s: float, arguments: Mapping[str, Any]) -> Any:
        async with self._turn:
            if self._comm is None or self._comm.closed():
                raise SandboxError("this sandbox is closed")
            with suppress(OSError):  # `_answer` raises it
                await self._comm.write({"method": method, **arguments})
            return await self._answer(timeout_s)

    async def _answer(self, timeout_s: float | None) -> Any:
        assert self._comm is not None
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._comm.read()
        except BaseException as error:  # an answer that comes later would be another request's
            self._comm.abort()
            if not isinstance(error, OSError):
                raise
            raise SandboxError(f"the reward worker {self._address} was lost") from error
        if "error" in message:
            raise _RAISED.get(message["error"], SandboxError)(message["message"])
        return message["result"]
