"""Episodes of one answer, and of several with the verifier's message about a wrong one between.

The reward of turn t (from 0) is the verifier's times `turn_discount` to the power of t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from areal_flow.core.concurrency import all_of
from areal_flow.core.settings import Settings, require
from areal_flow.core.types import Prompt
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TimedWorkflow,
    TrajectoryDraft,
)


class SingleTurn(Settings):
    """Question and answer."""

    name: Literal["single_turn"] = "single_turn"
    """The kind of episode; each workflow has its own settings."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        completion = await context.generate(prompt.tokens, turn=0)
        return [TrajectoryDraft(prompt.tokens).with_completion(completion)]


class MultiTurn(TimedWorkflow):
    """Answers, and tries again after the verifier's message, up to `max_turns` times in all."""

    name: Literal["multi_turn"] = "multi_turn"
    """What an episode is; each workflow has its own settings."""
    max_turns: int = Field(2, ge=1)
    """The most answers of a conversation."""
    turn_discount: float = Field(0.9, gt=0, le=1)
    """Multiplies the reward for each turn after the first."""
    message_template: str = "\n{message}\n"
    """The next user turn; with a chat template, its content."""
    wrong_answer_message: str = "That is wrong. Try again."
    """The message if the verifier has none."""
    num_branches: int = Field(1, ge=1)
    """Second answers after a wrong first one, each in a trajectory of its own."""

    @field_validator("message_template")
    @classmethod
    def _has_a_place(cls, template: str) -> str:
        require("{message}" in template, "workflow.message_template must contain {message}")
        return template

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        draft = await self._answer(TrajectoryDraft(prompt.tokens), context, turn=0)
        if self._with_message(draft, context, turn=1) is None:
            return [draft]
        branches = [draft.as_branch(branch) for branch in range(self.num_branches)]
        return await all_of(self._continue(branch, context) for branch in branches)

    async def _continue(self, draft: TrajectoryDraft, context: EpisodeContext) -> TrajectoryDraft:
        for turn in range(1, self.max_turns):
            if (extended := self._with_message(draft, context, turn)) is None:
                break
            draft = await self._answer(extended, context, turn)
        return draft

    async def _answer(
        self, draft: TrajectoryDraft, context: EpisodeContext, turn: int
    ) -> TrajectoryDraft:
        """Append a scored completion; the time limit may cut the episode after it."""
        completion = await context.generate(draft.tokens, turn, branch=draft.branch)
        score = await context.score(completion.tokens)
        if score.reward is not None:
            score = replace(score, reward=score.reward * self.turn_discount**turn)
        draft = draft.with_completion(completion).scored(score)
        limit = self.time_limit(context) if self._has_next(draft, turn + 1) else ""
        return draft.cut_by(limit) if limit else draft

    def _has_next(self, draft: TrajectoryDraft, turn: int) -> bool:
        score = draft.score
        assert score is not None
        # If the verifier itself failed, another answer would not help.
        is_wrong = score.reward is not None and score.verdict != "correct"
        return turn < self.max_turns and draft.finish_reason == "stop" and is_wrong

    def _with_message(
        self, draft: TrajectoryDraft, context: EpisodeContext, turn: int
    ) -> TrajectoryDraft | None:
        """Append the verifier's message; None if the conversation ends before this turn."""
        if not self._has_next(draft, turn):
            return None
        assert draft.score is not None
        message = draft.score.message or self.wrong_answer_message
        text = self.message_template.replace("{message}", message)
        extended = draft.with_environment(context.user_turn(text, after=draft.tokens))
        return extended if context.num_tokens_left(extended.tokens) > 0 else None
