"""What a verifier promises. Any callable of this shape can be named in a recipe."""

from __future__ import annotations

from typing import Protocol

from areal_flow.types import Score


class Verifier(Protocol):
    """Judges one completion; deterministic, quick, without side effects."""

    def __call__(self, *, prompt: str, completion: str, answer: str) -> Score | float:
        """Return a `Score`, or a bare reward.

        Args:
            prompt: the text that the policy was given.
            completion: the text that it produced, without the stop token.
            answer: the right answer.

        Raises:
            Exception: counted and stored as a verifier error; the completion gets no reward.
        """
        ...
