"""Requests and replies of OpenAI's APIs as JSON: chat completions, completions and responses.

Parameters that would change an answer and have no effect here are refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from time import time
from typing import Any

from areal_flow.policy.tokenizer.chat import Message
from areal_flow.rollout.workflows.agent_messages import CallRefused
from areal_flow.rollout.workflows.agent_session import Answer, Call, Session

MODEL = "policy"
MAX_CHOICES, MAX_STOP_STRINGS = 16, 4
Json = dict[str, Any]

_ALWAYS_ACCEPTED = {
    *("stream", "stream_options"),
    *("model", "temperature", "top_p", "top_k", "min_p", "seed"),  # the recipe's are used
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
}
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Accepted values of other parameters, besides null."""
_BIASED = "it would change the distribution of answers and bias the trainer's importance weights"
_JSON_ADVICE = f"{_BIASED}: describe the format in the prompt and check it in the reward"
_ADVICE = {
    "best_of": "use n",
    "functions": "use tools",
    "logprobs": "only sampled tokens have log-probabilities, which 0 returns",
    "response_format": _JSON_ADVICE,
    "text": _JSON_ADVICE,
    "tool_choice": f"{_BIASED}: use 'auto' or 'none', and request the call in the prompt",
    "top_logprobs": "only sampled tokens have log-probabilities",
    **dict.fromkeys(("frequency_penalty", "logit_bias", "presence_penalty"), _BIASED),
}


class TextCompletion:
    """A request of `completions`."""

    kind = chunk_kind = "text_completion"
    end_of_stream = b"data: [DONE]\n\n"

    def __init__(self, body: Json, _: Session) -> None:
        self.call = self._call(body)
        name = f"cmpl-{secrets.token_hex(8)}"
        self._header = {"id": name, "created": int(time()), "model": MODEL}
        self._has_usage = (body.get("stream_options") or {}).get("include_usage")

    def _call(self, body: Json) -> Call:
        _check(body, "prompt", "max_tokens", "n", "stop", logprobs=(0,))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        is_tokens = isinstance(prompt, list) and all(type(t) is int and t >= 0 for t in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise CallRefused(f"expected one prompt, a text or its tokens, found {prompt!r:.80}")
        return _sampled(body, prompt=prompt, has_logprobs=body.get("logprobs") is not None)

    def reply(self, answers: Sequence[Answer]) -> Json:
        choices = [
            {"index": index, **self._content(answer), **self._ending(answer)}
            for index, answer in enumerate(answers)
        ]
        return {**self._header, "object": self.kind, "choices": choices, "usage": _usage(answers)}

    def _content(self, answer: Answer) -> Json:
        return {"text": answer.message["content"]}

    def _ending(self, answer: Answer) -> Json:
        logprobs = self._logprobs(answer.logprobs) if self.call.has_logprobs else None
        return {"finish_reason": answer.finish_reason, "logprobs": logprobs}

    def _logprobs(self, logprobs: Sequence[tuple[str, float]]) -> Json:
        texts = [text for text, _ in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in logprobs],
            "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)],
            "top_logprobs": None,
        }

    def _chunk(self, **choice: Any) -> Json:
        choices = [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]
        return {**self._header, "object": self.chunk_kind, "choices": choices if choice else []}

    def begin(self) -> Iterator[Json]:
        """Yield the first events of a stream."""
        yield from ()

    def piece(self, text: str) -> Iterator[Json]:
        """Yield the events of the next piece of the content."""
        yield self._chunk(text=text)

    def end(self, answer: Answer, rest: str) -> Iterator[Json]:
        """Yield the last events; `rest` is the end of the content, which was in no piece."""
        yield self._chunk(text=rest, **self._ending(answer))
        yield from self._usage_chunk(answer)

    def _usage_chunk(self, answer: Answer) -> Iterator[Json]:
        if self._has_usage:
            yield {**self._chunk(), "usage": _usage([answer])}


class ChatCompletion(TextCompletion):
    """A request of `chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _call(self, body: Json) -> Call:
        used = ("messages", "tools", "max_tokens", "max_completion_tokens", "n", "stop")
        _check(body, *used, logprobs=(True, False))
        messages, tools = body.get("messages"), body.get("tools") or ()
        if not isinstance(messages, list) or not messages:
            raise CallRefused("expected messages, a list with role and content each")
        tools = () if body.get("tool_choice") == "none" else tools
        has_logprobs = bool(body.get("logprobs"))
        return _sampled(body, messages=messages, tools=tools, has_logprobs=has_logprobs)

    def _content(self, answer: Answer) -> Json:
        return {"message": answer.message}

    def _logprobs(self, logprobs: Sequence[tuple[str, float]]) -> Json:
        content = [
            {"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []}
            for text, logprob in logprobs
        ]
        return {"content": content}

    def begin(self) -> Iterator[Json]:
        yield self._chunk(delta={"role": "assistant", "content": ""})

    def piece(self, text: str) -> Iterator[Json]:
        yield self._chunk(delta={"content": text})

    def end(self, answer: Answer, rest: str) -> Iterator[Json]:
        delta: Json = {"content": rest}
        if calls := answer.message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        yield self._chunk(delta=delta)
        yield self._chunk(delta={}, **self._ending(answer))
        yield from self._usage_chunk(answer)


class Response:
    """A request of `responses`, whose items become messages."""

    end_of_stream = b""

    def __init__(self, body: Json, session: Session) -> None:
        used = ("input", "instructions", "tools", "max_output_tokens", "previous_response_id")
        _check(body, *used)
        previous, items = body.get("previous_response_id"), body.get("input")
        if previous is not None and str(previous) not in session.responses:
            raise CallRefused(f"this session has no response {previous!r:.80}")
        if not items or not isinstance(items, str | list):
            raise CallRefused(f"expected input, a text or a list of items, found {items!r:.80}")
        self._messages = [*session.responses.get(previous or "", ()), *_messages(items)]
        instructions, tools = body.get("instructions"), body.get("tools") or []
        system = [{"role": "system", "content": instructions}] if instructions else []
        may_call = body.get("tool_choice") != "none"
        self.call = Call(
            messages=[*system, *self._messages],
            tools=[_chat_tool(tool) for tool in tools if may_call] or (),
            max_new_tokens=_number(body, "max_output_tokens"),
        )
        self._session, name = session, secrets.token_hex(8)
        self._message_id, self._has_message, self._num_events = f"msg_{name}", False, 0
        self._fields: Json = {
            **{"id": f"resp_{name}", "object": "response", "created_at": int(time())},
            **{"model": MODEL, "error": None, "incomplete_details": None, "metadata": {}},
            **{"instructions": instructions, "previous_response_id": previous, "tools": tools},
            **{"parallel_tool_calls": True, "tool_choice": "auto" if may_call else "none"},
            **{"status": "in_progress", "output": []},
        }

    def reply(self, answers: Sequence[Answer]) -> Json:
        (answer,) = answers
        self._session.responses[self._fields["id"]] = [*self._messages, answer.message]
        is_cut = answer.finish_reason == "length"
        return {
            **self._fields,
            "status": _status(answer),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(answer),
            "usage": {
                **_usage(answers, "input_tokens", "output_tokens"),
                **{"input_tokens_details": {"cached_tokens": 0}},
                **{"output_tokens_details": {"reasoning_tokens": 0}},
            },
        }

    def _items(self, answer: Answer) -> list[Json]:
        content, calls = answer.message["content"], answer.message.get("tool_calls") or ()
        items = [self._message(_status(answer), _part(content))] if content or not calls else []
        for call in calls:
            item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
            items.append({**item, **call["function"], "status": "completed"})
        return items

    def _message(self, status: str, *content: Json) -> Json:
        item = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}

    def begin(self) -> Iterator[Json]:
        yield self._event("created", response=self._fields)

    def piece(self, text: str) -> Iterator[Json]:
        place: Json = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        if not self._has_message:
            self._has_message, item = True, self._message("in_progress")
            yield self._event("output_item.added", output_index=0, item=item)
            yield self._event("content_part.added", **place, part=_part(""))
        yield self._event("output_text.delta", **place, delta=text, logprobs=[])

    def end(self, answer: Answer, rest: str) -> Iterator[Json]:
        for index, item in enumerate(self._items(answer)):
            place: Json = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                if rest or not self._has_message:
                    yield from self.piece(rest)
                (part,), place = item["content"], {**place, "content_index": 0}
                yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
                yield self._event("content_part.done", **place, part=part)
            else:
                started = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("output_item.added", output_index=index, item=started)
                arguments, kind = item["arguments"], "function_call_arguments"
                yield self._event(f"{kind}.delta", **place, delta=arguments)
                yield self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(_status(answer), response=self.reply([answer]))


Api = ChatCompletion | TextCompletion | Response
APIS: Mapping[str, type[Api]] = {
    "chat/completions": ChatCompletion,
    "completions": TextCompletion,
    "responses": Response,
}
"""By path."""


def _check(body: Json, *used: str, **accepted: tuple[Any, ...]) -> None:
    """Refuse parameters that would have to change an answer and cannot."""
    for name, value in body.items():
        if name in _ALWAYS_ACCEPTED or name in used or value is None:
            continue
        if value not in {**_ACCEPTED, **accepted}.get(name, ()):
            advice = f": {_ADVICE[name]}" if name in _ADVICE else ""
            raise CallRefused(f"unsupported {name} {value!r:.80}{advice}")


def _sampled(body: Json, **request: Any) -> Call:
    call = Call(
        max_new_tokens=_number(body, "max_completion_tokens") or _number(body, "max_tokens"),
        stop=_stop(body),
        num_choices=_number(body, "n", maximum=MAX_CHOICES) or 1,
        **request,
    )
    if call.num_choices > 1 and body.get("stream"):
        raise CallRefused(f"unsupported n {call.num_choices} with stream: leave out one of them")
    return call


def _number(body: Json, name: str, *, maximum: float = inf) -> int | None:
    if (number := body.get(name)) is None:
        return None
    if type(number) is not int or not 1 <= number <= maximum:
        upper = "" if maximum == inf else f" to {maximum}"
        raise CallRefused(f"{name}: expected a number from 1{upper}, found {number!r:.80}")
    return number


def _stop(body: Json) -> tuple[str, ...]:
    stop = body.get("stop") or []
    strings = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(strings, list) and len(strings) <= MAX_STOP_STRINGS
    if not is_list or not all(isinstance(each, str) and each for each in strings):
        raise CallRefused(
            f"stop: expected up to {MAX_STOP_STRINGS} strings, none empty, found {stop!r:.80}"
        )
    return tuple(strings)


def _usage(
    answers: Sequence[Answer], prompt: str = "prompt_tokens", sampled: str = "completion_tokens"
) -> dict[str, int]:
    num_prompt = answers[0].num_prompt_tokens
    num_sampled = sum(answer.num_completion_tokens for answer in answers)
    return {prompt: num_prompt, sampled: num_sampled, "total_tokens": num_prompt + num_sampled}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(items: str | list[Any]) -> list[Message]:
    """Return items of the responses API as messages; calls join the answer before them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = list[Json]()
    for item in items:
        match item:
            case {"role": role, "content": content}:
                messages.append({"role": role, "content": content})
            case {"type": "function_call_output", "call_id": name, "output": result}:
                messages.append({"role": "tool", "tool_call_id": name, "content": result})
            case {
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
            }:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case _:
                raise CallRefused(
                    f"unsupported item of input {item!r:.80}: expected a message, function_call or "
                    "function_call_output"
                )
    return list[Message](messages)


def _chat_tool(tool: Any) -> Json:
    """Return a tool of the responses API as in chat completions."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise CallRefused(f"unsupported tool {tool!r:.80}: only functions can be called")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
