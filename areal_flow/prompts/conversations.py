"""Rows of messages for supervised fine-tuning: what the policy reads, and what is said after it.

Published data sets have a `prompt` of messages and completions of messages, or completions that are
whole conversations with one beginning, which is the prompt; those of Anthropic's `hh-rlhf` are
texts. This module depends on neither chat templates nor files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from areal_flow.models.chat import Message
from areal_flow.prompts.rows import Row, checked_message, checked_text, text_of

WHOLE = "messages"
"""The field of a row that is one whole conversation."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def has_messages(row: Row, fields: Sequence[str]) -> bool:
    """Return whether a row holds messages where others hold texts."""
    fields = _fields_of(row, fields)
    transcripts = any(_is_transcript(row, field) for field in fields)
    return transcripts or any(_is_list_of_messages(row.get(name)) for name in ("prompt", *fields))


def conversation_of(
    row: Row, fields: Sequence[str]
) -> tuple[list[Message], list[tuple[str, list[Message]]]]:
    """Return the prompt's messages and, of each completion, its field and the messages after them.

    The first and the last message of a completion are the assistant's.

    If the one field is missing, `messages` takes its place.
    """
    fields = _fields_of(row, fields)
    said = [_messages(row, field) for field in fields]
    for field, messages in zip(fields, said, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"field {field!r}: expected the assistant's message at the end, found "
                f"{messages[-1]['role']}"
            )
    if all(messages[0]["role"] == "assistant" for messages in said):
        return _prompt_of(row), [*zip(fields, said, strict=True)]
    num_shared = _num_shared(fields, said)
    _check_prompt(row, said[0][:num_shared], fields)
    rest = [messages[num_shared:] for messages in said]
    return said[0][:num_shared], [*zip(fields, rest, strict=True)]


def _fields_of(row: Row, fields: Sequence[str]) -> Sequence[str]:
    return (WHOLE,) if len(fields) == 1 and fields[0] not in row and WHOLE in row else fields


def _is_list_of_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


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
        if message["role"] == "assistant":
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


def _num_shared(fields: Sequence[str], said: Sequence[Sequence[Message]]) -> int:
    """Return with how many messages whole conversations begin alike; one's ends at an answer."""
    if len(said) == 1:
        return len([*takewhile(lambda message: message["role"] != "assistant", said[0])])
    turns = [[(each["role"], each["content"]) for each in messages] for messages in said]
    shared = [*takewhile(lambda at: len({*at}) == 1, zip(*turns, strict=False))]
    next_roles = [each[len(shared)][0] if len(shared) < len(each) else "the end" for each in turns]
    if not shared or {*next_roles} != {"assistant"}:
        raise ValueError(
            f"fields {fields[0]!r} and {fields[1]!r}: expected conversations that are alike up to "
            f"the assistant's message where they part, found that they part at message "
            f"{len(shared) + 1}, which is {' and '.join(next_roles)}"
        )
    return len(shared)


def _check_prompt(row: Row, beginning: Sequence[Message], fields: Sequence[str]) -> None:
    """Refuse a prompt that stands beside whole conversations and is none of their beginning."""
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
