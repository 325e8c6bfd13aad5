"""Tokenises rows for supervised fine-tuning: prompts with one or more completions.

A prompt is tokenised as for an episode, and each turn after it separately. The policy's turns are
trained and end with a stop token; those of the environment are context. Rows of messages hold a
`prompt` and completions, or whole conversations with a common start, or texts as in `hh-rlhf`; and
`tools`, if their messages call some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from areal_flow.core.errors import ModelError, PromptError
from areal_flow.policy.tokenizer.chat import ChatTemplate, Message
from areal_flow.policy.tokenizer.directory import prompt_tokens
from areal_flow.rollout.prompts.files import Place, read_prompts, refuse_bad_rows
from areal_flow.rollout.prompts.formats import hub_dataset
from areal_flow.rollout.prompts.rendering import with_system_message
from areal_flow.rollout.prompts.rows import (
    Row,
    checked_message,
    checked_text,
    text_of,
    texts_of_turns,
    tools_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_CHECKED = 1024
"""Good rows that are read before the model is loaded."""

WHOLE = "messages"
"""The field with a whole conversation."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}

TokenisedRow: TypeAlias = tuple[list[int], list[list[list[int]]]]
"""The prompt, and for each completion the turns of policy and environment, which alternate."""


def tokenise_completions(
    path: Path,
    target: Path,
    *,
    encoder: RowEncoder,
    max_tokens: int,
    fields: Sequence[str] = ("completion",),
) -> int:
    """Write prompts with their completions as arrays of tokens; return the number of rows.

    Args:
        path: rows of `prompt` and `fields`; a completion is a text, a list of texts (policy and
            environment alternate), or messages.
        target: an .npz of `tokens` (all sequences, concatenated), `trained` (same length, true for
            the policy's completions), and per sequence `prompt_lengths` and `lengths`. A sequence
            is a prompt and a completion.
        encoder: tokenises a row.
        max_tokens: of all completions of a row together.
        fields: the completions of a row, which must differ.
    """

    def tokenised(row: Row) -> list[tuple[list[int], list[list[int]]]]:
        prompt, completions = encoded = encoder.encode(row, fields)
        _check_tokens(encoded, fields, max_tokens)
        return [(prompt, turns) for turns in completions]

    bad_rows: dict[Place, PromptError] = {}
    read = read_prompts(path, tokenised, on_bad=bad_rows.__setitem__, once=True)
    rows = [*chain.from_iterable(read)]
    refuse_bad_rows(bad_rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In order: the prompt, then the turns of policy (trained) and environment, which alternate.
    parts = [[prompt, *turns] for prompt, turns in rows]
    np.savez(
        target,
        tokens=np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.int32),
        trained=np.fromiter(
            (index % 2 == 1 for row in parts for index, part in enumerate(row) for _ in part),
            np.bool_,
        ),
        prompt_lengths=np.array([len(prompt) for prompt, _ in rows], np.int32),
        lengths=np.array([sum(map(len, row)) for row in parts], np.int32),
    )
    return len(rows) // len(fields)


def check_first_completions(path: Path, fields: Sequence[str]) -> None:
    """Refuse a file that is empty or starts with bad rows, before the model is loaded."""

    def check(row: Row) -> None:
        if has_messages(row, fields):
            conversation_of(row, fields)
            tools_of(row)
        else:
            text_of(row, "prompt")
            for field in fields:
                texts_of_turns(row, field)

    if hub_dataset(path):
        return  # not fetched yet
    bad_rows: dict[Place, PromptError] = {}
    for _ in islice(read_prompts(path, check, on_bad=bad_rows.__setitem__), NUM_CHECKED):
        pass
    refuse_bad_rows(bad_rows)


def _check_tokens(row: TokenisedRow, fields: Sequence[str], max_tokens: int) -> None:
    prompt, completions = row
    if len(fields) == 2 and completions[0] == completions[1]:
        raise ValueError(f"fields {fields[0]!r} and {fields[1]!r}: found the same text twice")
    length = sum(len(prompt) + sum(map(len, turns)) for turns in completions)
    if not prompt or length > max_tokens:
        raise ValueError(
            f"{len(prompt)} prompt and {length} tokens in all, expected 1 or more and at most "
            f"trainer.tokens_per_micro_batch ({max_tokens})"
        )
    for field, turns in zip(fields, completions, strict=True):
        if not any(turns[::2]):
            raise ValueError(
                f"field {field!r}: found a text of which the model's tokenizer makes no token, "
                "expected one or more"
            )


class RowEncoder:
    """Tokenises rows of texts, or of messages by a chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int],
        chat: ChatTemplate | None = None,
        system: str = "",
        with_stop: bool = True,
    ) -> None:
        """`with_stop`: whether answers end with a stop token."""
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids
        self._chat, self._system, self._with_stop = chat, system, with_stop
        # Cached: several rows may share a prompt.
        self._prompt_tokens = lru_cache(maxsize=None)(partial(prompt_tokens, tokenizer))
        self._tokens = lru_cache(maxsize=None)(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        )

    def encode(self, row: Row, fields: Sequence[str]) -> TokenisedRow:
        if has_messages(row, fields):
            return self._encode_messages(row, fields)
        prompt = self._prompt_tokens(text_of(row, "prompt"))
        completions = [[*map(self._tokens, texts_of_turns(row, field))] for field in fields]
        end = self._stop_token_ids[:1] if self._with_stop else ()
        return prompt, [[*turns[:-1], [*turns[-1], *end]] for turns in completions]

    def _encode_messages(self, row: Row, fields: Sequence[str]) -> TokenisedRow:
        if self._chat is None:
            raise ModelError(
                "supervised fine-tuning found rows of messages, and the model's tokenizer has no "
                "chat template, neither a file chat_template.jinja nor chat_template in "
                "tokenizer_config.json: use a chat model's tokenizer, give it such a file, or "
                f"write rows of text: prompt and {' and '.join(fields)}"
            )
        prompt, completions = conversation_of(row, fields)
        prompt = with_system_message(prompt, self._system)
        tools, stops = tools_of(row), [*self._stop_texts.values()]
        conversations, rendered = [], set[str]()
        for field, messages in completions:
            try:
                text, spans = self._chat.answers(
                    [*prompt, *messages], len(prompt), stop_texts=stops, tools=tools
                )
            except ValueError as error:
                raise ValueError(f"field {field!r}: {error}") from error
            conversations.append([*self._turns(text, spans)])
            rendered.add(text[: spans[0][0]])
        if len(rendered) > 1:
            raise ValueError(
                f"fields {' and '.join(fields)}: the chat template renders their prompt in "
                "different ways, since it shows tools beside the last message of the user"
            )
        return self._tokens(rendered.pop()), conversations

    def _turns(self, text: str, spans: Sequence[tuple[int, int]]) -> Iterable[list[int]]:
        """Yield the policy's answers with their stop tokens, and the texts between answers."""
        starts = [start for start, _ in spans[1:]]
        for (start, end), next_start in zip_longest(spans, starts):
            answer, stop = text[start:end], self._stop_token_ids[:1]
            for token, stop_text in self._stop_texts.items():
                if stop_text and answer.endswith(stop_text):
                    answer, stop = answer.removesuffix(stop_text), [token]
            if self._with_stop:
                yield [*self._tokens(answer), *stop]
            else:
                answer = answer.rstrip()
                end = start + len(answer)
                yield self._tokens(answer)
            if next_start is not None:
                yield self._tokens(text[end:next_start])

    @cached_property
    def _stop_texts(self) -> dict[int, str]:
        decode = self._tokenizer.decode
        return {token: decode([token], skip_special_tokens=False) for token in self._stop_token_ids}


def has_messages(row: Row, fields: Sequence[str]) -> bool:
    """Return whether a row holds messages rather than texts."""
    fields = _fields_of(row, fields)
    lists = (row[name] for name in ("prompt", *fields) if isinstance(row.get(name), list))
    transcripts = any(_is_transcript(row, field) for field in fields)
    return transcripts or any(value and isinstance(value[0], Mapping) for value in lists)


def conversation_of(
    row: Row, fields: Sequence[str]
) -> tuple[list[Message], list[tuple[str, list[Message]]]]:
    """Return the prompt's messages and, for each completion, its field and messages.

    The first and last message of a completion are the assistant's. `messages` replaces a single
    field that is missing.
    """
    fields = _fields_of(row, fields)
    conversations = [_messages(row, field) for field in fields]
    for field, messages in zip(fields, conversations, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"field {field!r}: expected the assistant's message at the end, found "
                f"{messages[-1]['role']}"
            )
    if all(messages[0]["role"] == "assistant" for messages in conversations):
        return _prompt_of(row), [*zip(fields, conversations, strict=True)]
    num_shared = _num_shared(fields, conversations)
    _check_prompt(row, conversations[0][:num_shared], fields)
    rest = [messages[num_shared:] for messages in conversations]
    return conversations[0][:num_shared], [*zip(fields, rest, strict=True)]


def _fields_of(row: Row, fields: Sequence[str]) -> Sequence[str]:
    return (WHOLE,) if len(fields) == 1 and fields[0] not in row and WHOLE in row else fields


def _is_transcript(row: Row, field: str) -> bool:
    text = row.get(field)
    return "prompt" not in row and isinstance(text, str) and _SPEAKER.match(text) is not None


def _messages(row: Row, field: str) -> list[Message]:
    value = row.get(field)
    if _is_transcript(row, field):
        _, *parts = _SPEAKER.split(row[field])
        turns = zip(parts[::2], parts[1::2], strict=True)
        value = [{"role": _ROLES[who], "content": text.strip()} for who, text in turns]
    if not isinstance(value, list):
        return [{"role": "assistant", "content": text_of(row, field)}]
    messages = [checked_message(message, field) for message in value]
    if not messages:
        raise ValueError(f"field {field!r}: expected messages, found none")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            checked_text(message["content"], field)
    return messages


def _prompt_of(row: Row) -> list[Message]:
    value = row.get("prompt")
    if not isinstance(value, list):
        return [{"role": "user", "content": text_of(row, "prompt")}]
    messages = _messages(row, "prompt")
    if messages[-1]["role"] in ("assistant", "system"):
        raise ValueError(
            f"field 'prompt': expected the user's message at the end, found {messages[-1]['role']}"
        )
    return messages


def _num_shared(fields: Sequence[str], conversations: Sequence[Sequence[Message]]) -> int:
    """Return the number of messages before the (first differing) answer of whole conversations."""
    if len(conversations) == 1:
        return len([*takewhile(lambda message: message["role"] != "assistant", conversations[0])])
    pairs = zip(*conversations, strict=False)
    num = len([*takewhile(lambda same: all(each == same[0] for each in same), pairs)])
    next_roles = [each[num]["role"] if num < len(each) else "the end" for each in conversations]
    if not num or {*next_roles} != {"assistant"}:
        raise ValueError(
            f"fields {fields[0]!r} and {fields[1]!r}: expected conversations that are alike up to "
            f"the assistant's message where they part, found that they part at message {num + 1}, "
            f"which is {' and '.join(next_roles)}"
        )
    return num


def _check_prompt(row: Row, beginning: Sequence[Message], fields: Sequence[str]) -> None:
    """Refuse a prompt beside whole conversations that is not part of their start."""
    if "prompt" not in row or row["prompt"] is None:
        return
    if isinstance(row["prompt"], list):
        raise ValueError(
            f"field {fields[0]!r}: expected the assistant's message first, since the row has a "
            f"prompt of messages, found {beginning[0]['role']}"
        )
    texts = {message["content"].strip() for message in beginning}
    if text_of(row, "prompt").strip() not in texts:
        raise ValueError(
            f"field 'prompt': expected a message of the conversation in field {fields[0]!r} before "
            f"the answer, found {row['prompt']!r:.40}"
        )
