"""Chat templates: messages as the text that a model was trained to read.

Templates render conversations whole, while here a policy's tokens are only ever appended to. So the
turn that follows an answer is cut out of a rendered conversation, and a template that would show
the policy another answer than the one it gave is refused. This module refuses to read files and to
tokenise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Message = Mapping[str, str]
"""`role` and `content`."""

_ANSWER = "areal-flow's answer"
_ANSWERS = (_ANSWER, f"<think>\nSteps.\n</think>\n\n{_ANSWER}")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the special tokens that it may name, such as `bos_token`."""

    source: str
    special_tokens: Mapping[str, str]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(self, messages: Sequence[Message]) -> str:
        """Return the conversation up to where the policy's answer begins.

        Raises:
            ValueError: the template refuses these messages, or is wrong.
        """
        from areal_flow.models.huggingface import render_jinja_template

        try:
            (rendered,), _ = render_jinja_template(
                [messages],
                chat_template=self.source,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program of its own
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template does not render messages of {roles}: {type(error).__name__}: "
                f"{error}"
            ) from error
        return str(rendered)

    def next_turn(self, content: str, *, ended_by: str) -> str:
        """Return what stands between an answer and the next one when the user says something.

        Args:
            content: of the user's message.
            ended_by: the text of the token that ended the answer, which is not repeated.

        Raises:
            ValueError: the template shows earlier answers otherwise than they were given.
        """
        if self._rewrites:
            raise ValueError(self._rewrites)
        _, _, following = self._asked_again(_ANSWER, content).partition(_ANSWER)
        before, _, rest = following.partition(ended_by)
        return following if before.strip() else rest

    @cached_property
    def _rewrites(self) -> str:
        """How an answer is shown once another message follows, if not as it was given."""
        first = self.render([_said("user", "?")])
        for answer in _ANSWERS:
            whole = self._asked_again(answer, "??")
            if not whole.removeprefix(first).lstrip().startswith(answer):
                return (
                    "the chat template rewrites earlier answers, and the policy must read what it "
                    f"wrote: expected {first + answer!r} before another message, found {whole!r}"
                )
        return ""

    def _asked_again(self, answer: str, content: str) -> str:
        said = _said("user", "?"), _said("assistant", answer), _said("user", content)
        return self.render(said)


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
