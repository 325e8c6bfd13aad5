"""An OpenAI-compatible endpoint on loopback, one per process, which listens while agents run.

    POST /sessions/ID/v1/chat/completions   answers of the policy, streamed on request
    POST /sessions/ID/v1/completions        the text that follows a prompt
    POST /sessions/ID/v1/responses          as chat completions, in OpenAI's newer form
    GET  /sessions/ID/v1/models[/policy]    the only model
    POST /sessions/ID/reward                {"reward": x}: the reward of the episode

The key of a session is its bearer token. A stream sends text as it is sampled, and tool calls when
the completion is done.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.typedefs import Handler

from areal_flow.core.errors import EngineError, WeightsError
from areal_flow.rollout.workflows.agent_messages import CallRefused
from areal_flow.rollout.workflows.agent_session import Session
from areal_flow.rollout.workflows.openai_api import APIS, MODEL, Api

HOST = "127.0.0.1"


@dataclass
class Endpoint:
    """The server of one event loop."""

    sessions: dict[str, tuple[str, Session]] = field(default_factory=dict)
    """Key and session, by name."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    runner: web.AppRunner | None = None
    port: int = 0

    async def start(self) -> None:
        async with self.starting:
            if self.runner is not None:
                return
            app = web.Application(client_max_size=64 << 20, middlewares=[_refusing])
            session = "/sessions/{session}"
            for path, api in APIS.items():
                app.router.add_post(f"{session}/v1/{path}", partial(self._complete, api))
            app.router.add_get(f"{session}/v1/models", self._models)
            app.router.add_get(f"{session}/v1/models/{MODEL}", self._models)
            app.router.add_post(f"{session}/reward", self._reward)
            # With `handler_cancellation`, a client that disconnects cancels its request.
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
            )
            await runner.setup()
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self.runner = runner

    async def stop(self) -> None:
        async with self.starting:
            if self.runner is not None and not self.sessions:
                runner, self.runner = self.runner, None
                await runner.cleanup()

    def _session(self, request: web.Request) -> Session:
        name = request.match_info["session"]
        if name not in self.sessions:
            raise CallRefused(
                f"there is no session {name!r}; its episode may be over",
                status=404,
                code="unknown_session",
            )
        key, session = self.sessions[name]
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(token.encode(), key.encode()):
            raise CallRefused("wrong API key for this session", status=401, code="invalid_api_key")
        return session

    async def _complete(self, api: type[Api], request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        parsed = api(body, session)
        if body.get("stream"):
            return await _streamed(request, parsed, session)
        return web.json_response(parsed.reply(await session.complete(parsed.call)))

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-flow"}
        is_list = request.path.endswith("/models")
        return web.json_response({"object": "list", "data": [model]} if is_list else model)

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.set_reward((await _body(request)).get("reward"))
        return web.json_response({"reward": session.reward})


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[tuple[str, str]]:
    """Serve a session; yield the `base_url` and the `api_key` of its agent."""
    endpoint = _ENDPOINTS.setdefault(asyncio.get_running_loop(), Endpoint())
    name, key = secrets.token_hex(8), secrets.token_urlsafe(24)
    endpoint.sessions[name] = key, session
    try:
        await endpoint.start()
        yield f"http://{HOST}:{endpoint.port}/sessions/{name}/v1", key
    finally:
        del endpoint.sessions[name]
        await endpoint.stop()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CallRefused("expected a JSON object as the body")
    return body


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what is refused, or cannot be sampled, with an error as JSON."""
    try:
        return await handler(request)
    except CallRefused as error:
        refused = error
    except (EngineError, WeightsError) as error:
        refused = CallRefused(str(error), status=503, code="engine")
    headers = {"x-should-retry": "false"}  # to the SDK
    return web.json_response(_error(refused), status=refused.status, headers=headers)


def _error(refused: CallRefused) -> dict[str, Any]:
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
    return {"error": error}


async def _streamed(request: web.Request, parsed: Api, session: Session) -> web.StreamResponse:
    """Send an answer while it is sampled; a refusal before its first piece is raised."""
    pieces: asyncio.Queue[str] = asyncio.Queue()
    answering = asyncio.create_task(session.complete(parsed.call, pieces.put_nowait))
    answering.add_done_callback(lambda _: pieces.put_nowait(""))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def send(events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())

    try:
        piece, num_sent = await pieces.get(), 0
        if not piece:
            await answering
        await response.prepare(request)
        await send(parsed.begin())
        while piece:
            await send(parsed.piece(piece))
            num_sent += len(piece)
            piece = await pieces.get()
        try:
            (answer,) = await answering
        except (EngineError, WeightsError) as error:
            await send([_error(CallRefused(str(error), code="engine"))])
            return response
        await send(parsed.end(answer, (answer.message["content"] or "")[num_sent:]))
        await response.write(parsed.end_of_stream)
        return response
    finally:
        answering.cancel()
