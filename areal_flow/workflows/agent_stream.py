"""The content of an answer while its tokens come: pieces of text that nothing later will change."""

from __future__ import annotations

from collections.abc import Callable

from areal_flow.workflows.context import EpisodeContext

CALL_START = "<tool_call>"
"""What stands before the JSON of a tool's call."""


class ContentStream:
    """Takes tokens one by one, and passes on text as soon as it is certain.

    A character whose bytes lie across tokens waits for the last of them. Where there are tools,
    nothing from a call on is passed on, nor white space that may stand before one.
    """

    def __init__(
        self, context: EpisodeContext, on_text: Callable[[str], None], *, has_tools: bool
    ) -> None:
        self._context = context
        self._on_text = on_text
        self._has_tools = has_tools
        self._tokens: list[int] = []
        self._num_shown = self._num_read = 0
        """Tokens before the last piece, and with it: text depends on the tokens before."""
        self._held = ""

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        recent, decode = self._tokens[self._num_shown :], self._context.decode
        before = decode(recent[: self._num_read - self._num_shown])
        text = decode(recent)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(before):
            return
        self._num_shown, self._num_read = self._num_read, len(self._tokens)
        self._pass_on(self._held + text[len(before) :])

    def _pass_on(self, text: str) -> None:
        certain = len(text)
        if self._has_tools:
            certain = text.find(CALL_START)
            if certain < 0:
                certain = len(text) - _length_of_mark_at_end(text)
            certain = len(text[:certain].rstrip())
        self._held = text[certain:]
        if certain:
            self._on_text(text[:certain])


def _length_of_mark_at_end(text: str) -> int:
    return next(n for n in range(len(CALL_START), -1, -1) if text.endswith(CALL_START[:n]))
