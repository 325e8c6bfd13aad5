"""Connections to OpenEnv servers, and servers that a process starts for itself.

A connection has its own environment. A message is JSON with a type and data: `reset` and `step` are
answered by an observation, `state` by the environment's state, and any of them by an error.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType

from areal_flow.policy.tokenizer.chat import Tool
from areal_flow.rollout.workflows.openenv import PORT, ActionRefused, OpenEnv, OpenEnvError

HOST = "127.0.0.1"
FULL, REFUSED = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Codes of errors: all sessions are taken; an action does not fit the environment's schema."""
WRONG_FIELDS = {"missing", "extra_forbidden"}
"""Pydantic's names of mistakes that are of `workflow.action_field`, not of the policy."""
START_RETRY_S, FULL_RETRY_S, LAST_OUTPUT_S = 0.2, 1.0, 0.1
MAX_MESSAGE_BYTES = 100 << 20
END_WITH_PARENT = """
exec 3<&0 </dev/null
{ cat <&3; kill -KILL 0; } >/dev/null 2>&1 &
exec 3<&-
"""
"""A shell's process group is killed once the kernel closes the parent's end of its input."""


class Server:
    """A server that ends with this process, however that ends."""

    def __init__(self, command: str) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        self.address = f"http://{HOST}:{port}"
        self.process = subprocess.Popen(
            ["sh", "-c", END_WITH_PARENT + command.replace(PORT, str(port))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,
        )
        self.last_lines = deque[str](maxlen=20)
        follow = self.last_lines.extend
        Thread(target=follow, args=(self.process.stdout,), daemon=True).start()


_SERVERS: dict[str, Server] = {}
"""By command."""


def running_server(command: str) -> Server:
    """Return the server of a command, started unless it is running."""
    server = _SERVERS.get(command)
    if server is None or server.process.poll() is not None:
        server = _SERVERS[command] = Server(command)
    return server


class Environment:
    """An environment, which ends with its connection."""

    def __init__(self, http: ClientSession, settings: OpenEnv) -> None:
        self._http, self._settings, self._began = http, settings, monotonic()
        self._server = running_server(settings.server) if PORT in settings.server else None
        self._address = self._server.address if self._server else settings.server.rstrip("/")
        self._socket: ClientWebSocketResponse | None = None

    async def ask(
        self, kind: str, data: Mapping[str, Any] | None = None, *, by_policy: bool = False
    ) -> dict[str, Any]:
        """Send a message, with or without data, and return the data of its answer.

        While other episodes have all of the server's sessions, this waits for one.

        Raises:
            ActionRefused: an action by the policy does not fit the environment's schema.
            OpenEnvError: the server cannot be reached, reports an error or was lost.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        while True:
            answer = await self._exchange(message)
            found: dict[str, Any] = answer["data"]
            if answer["type"] != "error":
                return found
            is_late = monotonic() - self._began > self._settings.episode_timeout_s
            if found.get("code") != FULL or is_late:
                break
            self._socket = None  # the server closes the connection
            await asyncio.sleep(FULL_RETRY_S)
        mistakes = found.get("errors", ())
        listed = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in mistakes)
        if self._settings.action_field and any(each["type"] in WRONG_FIELDS for each in mistakes):
            by_policy = False
        if by_policy and found.get("code") == REFUSED:
            raise ActionRefused(listed)
        raise await self._error(f"{kind} failed: {found.get('message')} {listed}".rstrip())

    async def tools(self) -> list[Tool]:
        """Return the schemas of the environment's MCP tools."""
        answer = await self.ask("step", {"type": "list_tools"})
        if not (tools := answer["observation"].get("tools")):
            raise await self._error("the environment lists no MCP tools: set workflow.mcp = false")
        functions = [
            {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
            for t in tools
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        kind, limit_s = message["type"], self._settings.timeout_s
        if self._socket is None:
            self._socket = await self._connect()
            self._next = asyncio.create_task(self._socket.receive())
        try:
            async with asyncio.timeout(limit_s):
                with suppress(ClientError, ConnectionError):  # what was received says why
                    await self._socket.send_json(message)
                received = await self._next
        except TimeoutError:
            raise await self._error(f"no answer to {kind} within {limit_s:g} s") from None
        if received.type is not WSMsgType.TEXT:
            raise await self._error(f"connection lost at {kind}, code {self._socket.close_code}")
        # Receive while the policy generates, too: this answers the server's pings.
        self._next = asyncio.create_task(self._socket.receive())
        answer: dict[str, Any] = received.json()
        return answer

    async def _connect(self) -> ClientWebSocketResponse:
        began, limit_s = monotonic(), self._settings.timeout_s
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    url = f"{self._address}/ws"
                    return await self._http.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
            except (ClientError, OSError) as error:
                is_starting = self._server and self._server.process.poll() is None
                if not is_starting or monotonic() - began > limit_s:
                    reason = str(error) or f"no answer within {limit_s:g} s"
                    raise await self._error(f"cannot be reached: {reason}") from error
            await asyncio.sleep(START_RETRY_S)

    async def _error(self, reason: str) -> OpenEnvError:
        if self._server:
            await asyncio.sleep(LAST_OUTPUT_S)
            if (code := self._server.process.poll()) is not None:
                output = "".join(self._server.last_lines.copy()).strip()
                reason += f"; its command ended with exit status {code}: {output}"
        return OpenEnvError(f"the OpenEnv server {self._address}: {reason}")
