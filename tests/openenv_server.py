"""A server that speaks OpenEnv's protocol, over aiohttp alone: `openenv_server.py PORT`.

Its environment repeats each message, with a reward of its length, and ends at `done`. Some messages
make the server misbehave. With a tool it adds numbers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import WSMsgType, web

COMMAND = f"{sys.executable} -P {__file__} {{port}}"
TOOL = {"name": "add", "description": "Add numbers.", "input_schema": {"type": "object"}}
OPEN = web.AppKey("open", set[web.WebSocketResponse])


def application(
    *, max_sessions: int = 100, has_tools: bool = False, heartbeat_s: float = 20.0
) -> web.Application:
    app = web.Application()
    app[OPEN] = set()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse(heartbeat=heartbeat_s)
        await connection.prepare(request)
        if len(app[OPEN]) >= max_sessions:
            await connection.send_json(error("CAPACITY_REACHED", "the server is full"))
            await connection.close()
            return connection
        app[OPEN].add(connection)
        environment = Environment(has_tools=has_tools)
        try:
            async for received in connection:
                if received.type is WSMsgType.TEXT:
                    answer = await environment.answer(received.json())
                    if answer is None:
                        request.transport.abort()
                        break
                    await connection.send_json(answer)
        finally:
            app[OPEN].discard(connection)
        return connection

    app.router.add_get("/ws", serve)
    return app


def error(code: str, message: str, *errors: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, "errors": errors}}


def observation(fields: Mapping[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    data = {"observation": fields, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Environment:
    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools, self._num_steps = has_tools, 0

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None to drop the connection."""
        match request:
            case {"type": "reset", "data": arguments}:
                shown = "".join(f"{name} {value}" for name, value in arguments.items())
                fields = {"board": {"text": shown}} if shown else {}
                return observation(fields, None, done=False)
            case {"type": "state", **rest} if not rest:
                return {"type": "state", "data": {"step_count": self._num_steps}}
            case {"type": "step", "data": action}:
                return await (self._tool(action) if self._has_tools else self._step(action))
        return error("UNKNOWN_TYPE", f"unknown: {request}")

    async def _step(self, action: Mapping[str, Any]) -> dict[str, Any] | None:
        self._num_steps += 1
        unknown = [
            {"type": "extra_forbidden", "loc": [name], "msg": "Extra inputs are not permitted"}
            for name in action.keys() - {"message"}
        ]
        if unknown:
            return error("VALIDATION_ERROR", "Invalid message", *unknown)
        match message := action["message"]:
            case "fail":
                return error("EXECUTION_ERROR", "no such move")
            case "hang":
                await asyncio.sleep(60)
            case "drop":
                return None
            case int():
                mistake = {"type": "string_type", "loc": ["message"], "msg": "Not a string"}
                return error("VALIDATION_ERROR", "Invalid message", mistake)
        shown = {"board": {"text": f"you: {message}"}}
        return observation(shown, float(len(message)), done=message == "done")

    async def _tool(self, action: Mapping[str, Any]) -> dict[str, Any]:
        match action:
            case {"type": "list_tools"}:
                return observation({"tools": [TOOL]}, None, done=False)
            case {"type": "call_tool", "tool_name": "add", "arguments": {"numbers": numbers}}:
                self._num_steps += 1
                content = [{"type": "text", "text": str(sum(numbers))}]
                result = {"content": content, "is_error": False}
                return observation({"tool_name": "add", "result": result}, 1.0, sum(numbers) == 9)
        fault = {"error_type": "invalid_args", "message": "expected numbers"}
        return observation({"tool_name": "add", "result": None, "error": fault}, None, done=False)


if __name__ == "__main__":
    web.run_app(application(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
