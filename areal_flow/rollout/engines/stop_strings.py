"""Finds strings that end a completion in its text, wherever they lie across its tokens.

The text is what the tokenizer makes of prompt and completion, special tokens included; only what
follows the prompt is searched. vLLM's own search has the same decoder and the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from areal_flow.core.types import GroupRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopStringSearch:
    """The end of one completion's text, as far as a stop string may have begun in it."""

    def __init__(self, tokenizer: Tokenizer, request: GroupRequest) -> None:
        self._tokenizer = tokenizer
        self._sampling = request.sampling
        prompt = request.prompt_tokens.tolist()
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=False)
        self._kept = max(map(len, request.sampling.stop_strings)) - 1
        self._text = ""
        self._num_tokens = 0

    def ends_with(self, token: int) -> bool:
        """Take the next token; return whether its text completes a stop string.

        A character of several tokens counts as the last one's. What is complete before
        `min_new_tokens` ends nothing.
        """
        added = self._text_of(token)
        before, text = len(self._text), self._text + added
        self._text = text[max(0, len(text) - self._kept) :]
        self._num_tokens += 1
        if self._num_tokens <= self._sampling.min_new_tokens:
            return False
        return any(
            text.find(string, max(0, before + 1 - len(string))) >= 0
            for string in self._sampling.stop_strings
        )

    def _text_of(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the tokenizers library raises nothing narrower
            if not str(error).startswith("Invalid prefix"):
                raise
            # Bytes that are no character, and are left out as vLLM does:
            # https://github.com/vllm-project/vllm/issues/17448
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token) or ""
