"""Tokenises rows for supervised fine-tuning: prompts with one or more completions.

A prompt is tokenised as for an episode, and each turn after it separately. The policy's turns are
trained and end with a stop token; those of the environment are context. Rows of messages hold a
`prompt` and completions, or whole conversations with a common start, or texts as in `hh-rlhf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, pairwise, takewhile
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
    ) -> None:
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids
        self._chat, self._system = chat, system
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
        end = self._stop_token_ids[:1]
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
        rendered = self._tokens(self._chat.render(prompt))
        conversations = []
        for field, messages in completions:
            try:
                conversations.append([*self._turns(self._chat, prompt, messages)])
            except ValueError as error:
                raise ValueError(f"field {field!r}: {error}") from error
        return rendered, conversations

    def _turns(
        self, chat: ChatTemplate, prompt: Sequence[Message], completion: Sequence[Message]
    ) -> Iterable[list[int]]:
        """Yield the policy's answers with their stop tokens, and the texts between answers."""
        messages = [*prompt, *completion]
        roles = [message["role"] for message in messages]
        answers = [i for i in range(len(prompt), len(messages)) if roles[i] == "assistant"]
        for index, next_index in pairwise([*answers, None]):
            assert index is not None
            answer, after = chat.answer(messages[: index + 1])
            end = self._end_of_answer(after)
            yield [*self._tokens(answer), *end]
            if next_index is not None:
                ended_by = self._stop_texts[end[0]] if end else ""
                between = chat.following(messages[:next_index], index, ended_by=ended_by)
                yield self._tokens(between)

    def _end_of_answer(self, after: str) -> list[int]:
        """Return the stop token at the start of a text, else the first one; empty without any."""
        texts, after = self._stop_texts, after.lstrip()
        matching = [token for token, text in texts.items() if text and after.startswith(text)]
        return [*(matching or self._stop_token_ids)][:1]

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
    turns = [[(each["role"], each["content"]) for each in messages] for messages in conversations]
    num = len([*takewhile(lambda same: len({*same}) == 1, zip(*turns, strict=False))])
    next_roles = [each[num][0] if num < len(each) else "the end" for each in turns]
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
