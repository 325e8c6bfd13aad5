"""What every workflow promises, and the trajectories that it drafts, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from areal_flow.core.settings import Settings
from areal_flow.core.types import (
    Completion,
    FinishReason,
    Logprobs,
    Prompt,
    Score,
    Tokens,
    VersionSpan,
    as_tokens,
    merged_spans,
)
from areal_flow.rollout.workflows.context import EpisodeContext


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryDraft:
    """A trajectory as a workflow makes it: it only ever grows at its end.

    `output_tokens`, `loss_mask` and `behavior_logprobs` are aligned, and `version_spans` cover as
    many tokens. A draft without a score is scored by the recipe's rewards.
    """

    prompt_tokens: Tokens
    output_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    behavior_logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "length"
    score: Score | None = None
    branch: int = 0

    def __post_init__(self) -> None:
        spanned = sum(span.length for span in self.version_spans)
        lengths = {len(self.loss_mask), len(self.behavior_logprobs), spanned}
        if lengths != {len(self.output_tokens)}:
            raise ValueError(
                f"expected mask, log-probabilities and version spans of {len(self.output_tokens)} "
                f"output tokens, found lengths {sorted(lengths)}"
            )

    @property
    def tokens(self) -> Tokens:
        return np.concatenate((self.prompt_tokens, self.output_tokens))

    def with_completion(self, completion: Completion) -> TrajectoryDraft:
        """Append tokens that the policy chose."""
        return self._with(
            completion.tokens,
            True,
            completion.logprobs,
            completion.version_spans,
            finish_reason=completion.finish_reason,
        )

    def with_environment(self, tokens: Sequence[int] | Tokens) -> TrajectoryDraft:
        """Append context, which is never trained, with the version of the token before it."""
        if not self.version_spans:
            raise ValueError("expected a completion before the environment's tokens, found none")
        version = self.version_spans[-1].version
        spans = (VersionSpan(version, len(tokens)),)
        nothing = np.zeros(len(tokens), np.float32)
        return self._with(as_tokens(tokens), False, nothing, spans)

    def as_branch(self, branch: int) -> TrajectoryDraft:
        """Return the beginning of another trajectory; branch 0 trains what is there so far."""
        mask = self.loss_mask if branch == 0 else np.zeros_like(self.loss_mask)
        return replace(self, branch=branch, loss_mask=mask)

    def scored(self, score: Score) -> TrajectoryDraft:
        return replace(self, score=score)

    def cut_by(self, limit: str) -> TrajectoryDraft:
        """Return the trajectory as one that a limit ended; its score's message says so."""
        score = self.score and replace(self.score, message=f"ended by {limit}")
        return replace(self, finish_reason="length", score=score)

    def _with(
        self,
        tokens: Tokens,
        chosen: bool,
        logprobs: Logprobs,
        spans: tuple[VersionSpan, ...],
        **changes: Any,
    ) -> TrajectoryDraft:
        return replace(
            self,
            output_tokens=_joined(self.output_tokens, tokens),
            loss_mask=_joined(self.loss_mask, np.broadcast_to(chosen, len(tokens))),
            behavior_logprobs=_joined(self.behavior_logprobs, logprobs),
            version_spans=merged_spans(self.version_spans + spans),
            **changes,
        )


def _joined(before: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """Return both, one after the other; a first completion is not copied."""
    return np.concatenate((before, more)) if len(before) else more


class Workflow(Protocol):
    """Turns a prompt into trajectories, for one member of its group.

    It runs on the generator's event loop beside many others: it awaits, and computes little.
    """

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return this member's trajectories: one, or one a branch.

        Raises:
            Exception: stored as this member's failure; the other members of its group go on.
        """


class TimedWorkflow(Settings):
    """A workflow whose episodes end in time."""

    max_seconds: float = Field(600.0, gt=0)
    """Time limit of an episode, after which it ends with what it has."""

    def time_limit(self, context: EpisodeContext) -> str:
        """Return the limit that an episode has reached before its next turn; empty if none."""
        is_late = context.elapsed_s() >= self.max_seconds
        return f"workflow.max_seconds ({self.max_seconds:g})" if is_late else ""
