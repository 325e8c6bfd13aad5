"""An OpenAI-compatible endpoint on loopback, one per process, which listens while agents run.

    POST /sessions/ID/v1/chat/completions   an answer of the policy, streamed on request
    GET  /sessions/ID/v1/models             the only model
    POST /sessions/ID/reward                {"reward": x}: the reward of the episode

The key of a session is its bearer token. A stream sends text as it is sampled, and tool calls when
the completion is done.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from areal_flow.core.errors import EngineError, WeightsError
from areal_flow.rollout.workflows.agent_messages import CallRefused
from areal_flow.rollout.workflows.agent_session import Answer, Session

HOST = "127.0.0.1"
MODEL = "policy"
_USED = {"messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
_SET_BY_RECIPE = {"model", "temperature", "top_p", "top_k", "min_p", "seed"}
_WITHOUT_EFFECT = {
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
}
"""Accepted: they do not change an answer."""
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
"""Accepted values of other parameters, besides null."""
_ADVICE = {
    "functions": ": give them as tools",
    "stop": ": set generation.stop.strings in the recipe",
    "tool_choice": ": use 'auto' or 'none'",
}


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
            app = web.Application(client_max_size=64 << 20)
            session = "/sessions/{session}"
            app.router.add_post(f"{session}/v1/chat/completions", self._complete)
            app.router.add_get(f"{session}/v1/models", self._models)
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

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            body = await _body(request)
            _check_parameters(body)
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
            tools = () if body.get("tool_choice") == "none" else body.get("tools") or ()
            complete = partial(session.complete, body["messages"], tools, limit)
            if body.get("stream"):
                return await _streamed(request, body, complete)
            return _completed(await complete())
        except CallRefused as refused:
            return _refusal(refused)
        except (EngineError, WeightsError) as error:
            return _refusal(CallRefused(str(error), status=503, code="engine"))

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except CallRefused as refused:
            return _refusal(refused)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-flow"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
            session.set_reward((await _body(request)).get("reward"))
        except CallRefused as refused:
            return _refusal(refused)
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


def _check_parameters(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallRefused("expected messages, a list with role and content each")
    for name, value in body.items():
        if name in _USED | _SET_BY_RECIPE | _WITHOUT_EFFECT or value is None:
            continue
        if value not in _ACCEPTED.get(name, ()):
            advice = _ADVICE.get(name, "")
            raise CallRefused(f"unsupported {name} {value!r:.80}{advice}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CallRefused(f"max_tokens: expected a number of 1 or more, found {limit!r:.80}")


def _refusal(refused: CallRefused) -> web.Response:
    headers = {"x-should-retry": "false"}  # to the SDK
    return web.json_response(_error(refused), status=refused.status, headers=headers)


def _error(refused: CallRefused) -> dict[str, Any]:
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
    return {"error": error}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }


def _header(kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": int(time()), "model": MODEL}


def _completed(answer: Answer) -> web.Response:
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    header = _header("chat.completion")
    return web.json_response({**header, "choices": [choice], "usage": _usage(answer)})


async def _streamed(
    request: web.Request,
    body: Mapping[str, Any],
    complete: Callable[[Callable[[str], None]], Coroutine[Any, Any, Answer]],
) -> web.StreamResponse:
    """Send an answer while it is sampled; a refusal before its first piece is raised."""
    pieces: asyncio.Queue[str] = asyncio.Queue()
    answering = asyncio.create_task(complete(pieces.put_nowait))
    answering.add_done_callback(lambda _: pieces.put_nowait(""))
    try:
        piece = await pieces.get()
        if not piece:
            await answering
        return await _sent(request, body, pieces, piece, answering)
    finally:
        answering.cancel()


async def _sent(
    request: web.Request,
    body: Mapping[str, Any],
    pieces: asyncio.Queue[str],
    piece: str,
    answering: asyncio.Task[Answer],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    header = _header("chat.completion.chunk")

    async def write(chunk: Mapping[str, Any]) -> None:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

    async def send(delta: Mapping[str, Any], finish_reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        await write({**header, "choices": [choice]})

    await send({"role": "assistant", "content": ""})
    num_sent = 0
    while piece:
        await send({"content": piece})
        num_sent += len(piece)
        piece = await pieces.get()
    try:
        answer = await answering
    except (EngineError, WeightsError) as error:
        await write(_error(CallRefused(str(error), code="engine")))
        return response
    rest: dict[str, Any] = {"content": (answer.message["content"] or "")[num_sent:]}
    if calls := answer.message.get("tool_calls"):
        rest["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    await send(rest)
    await send({}, answer.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        await write({**header, "choices": [], "usage": _usage(answer)})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
