"""The rows that supervised fine-tuning learns from, as arrays of tokens.

A prompt is tokenised as it would be for an episode, and each turn after it is tokenised by itself.
The policy's turns are trained and end with a stop token; the environment's turns are context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from areal_flow.errors import ModelError, PromptError
from areal_flow.models.chat import ChatTemplate, Message
from areal_flow.models.directory import prompt_tokens
from areal_flow.prompts.conversations import conversation_of, has_messages
from areal_flow.prompts.files import Place, read_prompts, refuse_bad_rows
from areal_flow.prompts.rendering import with_system_message
from areal_flow.prompts.rows import Row, text_of, texts_of_turns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_CHECKED = 1024
"""Good rows that are read before a model is."""

TokenisedRow: TypeAlias = tuple[list[int], list[list[list[int]]]]
"""The prompt, and of each completion the turns of the policy and of the environment."""


def tokenise_completions(
    path: Path,
    target: Path,
    *,
    encoder: RowEncoder,
    max_tokens: int,
    fields: Sequence[str] = ("completion",),
) -> int:
    """Write prompts with their completions as arrays of tokens; return how many rows there are.

    Args:
        path: JSONL or Parquet, rows of `prompt` and `fields`; a completion is a text, a list of
            texts of the policy and of the environment by turns, or messages.
        target: an .npz of `tokens` (all sequences, one after the other), `trained` as long, which
            is false where the environment speaks, and, by sequence, `prompt_lengths` and `lengths`,
            in tokens. Each completion is a sequence with the prompt before it.
        encoder: tokenises a row.
        max_tokens: of the longest row that training can pack, all its completions together.
        fields: the completions of a row; no two of them are equal.
    """

    def tokenised(row: Row) -> list[tuple[list[int], list[list[int]]]]:
        prompt, completions = found = encoder.encode(row, fields)
        _check_tokens(found, fields, max_tokens)
        return [(prompt, turns) for turns in completions]

    bad_rows: dict[Place, PromptError] = {}
    read = read_prompts(path, tokenised, on_bad=bad_rows.__setitem__, once=True)
    rows = [*chain.from_iterable(read)]
    refuse_bad_rows(bad_rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    # One after the other: the prompt, and the turns of the policy (trained) and the environment.
    parts = [[prompt, *turns] for prompt, turns in rows]
    np.savez(
        target,
        tokens=np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.int32),
        trained=np.fromiter(
            (place % 2 == 1 for row in parts for place, part in enumerate(row) for _ in part),
            np.bool_,
        ),
        prompt_lengths=np.array([len(prompt) for prompt, _ in rows], np.int32),
        lengths=np.array([sum(map(len, row)) for row in parts], np.int32),
    )
    return len(rows) // len(fields)


def check_first_completions(path: Path, fields: Sequence[str]) -> None:
    """Refuse a file that is empty or has bad rows at first, by the rows alone, without a model."""

    def check(row: Row) -> None:
        if has_messages(row, fields):
            conversation_of(row, fields)
        else:
            text_of(row, "prompt")
            for field in fields:
                texts_of_turns(row, field)

    bad_rows: dict[Place, PromptError] = {}
    for _ in islice(read_prompts(path, check, on_bad=bad_rows.__setitem__), NUM_CHECKED):
        pass
    refuse_bad_rows(bad_rows)


def _check_tokens(row: TokenisedRow, fields: Sequence[str], max_tokens: int) -> None:
    """Refuse what nothing can be learned from, and what no micro-batch holds."""
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
    """Tokenises prompts with their completions: of texts, or of messages by a chat template."""

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
        # The same prompt may stand before several completions.
        self._prompt_tokens = lru_cache(maxsize=None)(partial(prompt_tokens, tokenizer))
        self._tokens = lru_cache(maxsize=None)(self._encode_text)

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
        read = self._tokens(self._chat.render(prompt))
        said = []
        for field, messages in completions:
            try:
                said.append([*self._turns(self._chat, prompt, messages)])
            except ValueError as error:
                raise ValueError(f"field {field!r}: {error}") from error
        return read, said

    def _turns(
        self, chat: ChatTemplate, prompt: Sequence[Message], completion: Sequence[Message]
    ) -> Iterable[list[int]]:
        """Yield the policy's answers, each with what ended it, and what stands between them."""
        messages = [*prompt, *completion]
        own = [at for at in range(len(prompt), len(messages)) if _is_answer(messages[at])]
        for at, following in pairwise([*own, None]):
            assert at is not None
            answer, after = chat.answer(messages[: at + 1])
            end = self._end_of_answer(after)
            yield [*self._tokens(answer), *end]
            if following is not None:
                ended_by = self._stop_texts[end[0]] if end else ""
                shown = chat.following(messages[:following], at, ended_by=ended_by)
                yield self._tokens(shown)

    def _end_of_answer(self, after: str) -> list[int]:
        """Return the stop token with which a text begins, else the first; nothing without any."""
        texts, after = self._stop_texts, after.lstrip()
        shown = [token for token, text in texts.items() if text and after.startswith(text)]
        return [*(shown or self._stop_token_ids)][:1]

    @cached_property
    def _stop_texts(self) -> dict[int, str]:
        decode = self._tokenizer.decode
        return {token: decode([token], skip_special_tokens=False) for token in self._stop_token_ids}

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")
