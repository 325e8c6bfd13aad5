"""A conversation with the verifier: its message about a wrong answer is the next user turn.

The reward of turn t (from 0) is the verifier's times `turn_discount` to the power of t. Tokens of
the environment are context: they are appended, and the loss mask leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from areal_flow.core.settings import require
from areal_flow.core.types import Prompt
from areal_flow.rollout.workflows.context import EpisodeContext
from areal_flow.rollout.workflows.group import all_of
from areal_flow.rollout.workflows.protocol import TimedWorkflow, TrajectoryDraft


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
        draft = await self._answered(TrajectoryDraft(prompt.tokens), context, turn=0)
        if self._asked_again(draft, context, turn=1) is None:
            return [draft]
        branches = [draft.as_branch(branch) for branch in range(self.num_branches)]
        return await all_of(self._converse(branch, context) for branch in branches)

    async def _converse(self, draft: TrajectoryDraft, context: EpisodeContext) -> TrajectoryDraft:
        turn = 1
        while (next_draft := self._asked_again(draft, context, turn)) is not None:
            draft = await self._answered(next_draft, context, turn)
            turn += 1
        return draft

    async def _answered(
        self, draft: TrajectoryDraft, context: EpisodeContext, turn: int
    ) -> TrajectoryDraft:
        completion = await context.generate(draft.tokens, turn, branch=draft.branch)
        score = await context.score(completion.tokens)
        if score.reward is not None:
            score = replace(score, reward=score.reward * self.turn_discount**turn)
        draft = draft.with_completion(completion).scored(score)
        limit = self.time_limit(context) if self._goes_on(draft, turn + 1) else ""
        return draft.cut_by(limit) if limit else draft

    def _goes_on(self, draft: TrajectoryDraft, turn: int) -> bool:
        score = draft.score
        assert score is not None
        # Where the verifier itself failed, another answer would not help.
        is_wrong = score.reward is not None and score.verdict != "right"
        return turn < self.max_turns and draft.finish_reason == "stop" and is_wrong

    def _asked_again(
        self, draft: TrajectoryDraft, context: EpisodeContext, turn: int
    ) -> TrajectoryDraft | None:
        if not self._goes_on(draft, turn):
            return None
        assert draft.score is not None
        message = draft.score.message or self.wrong_answer_message
        text = self.message_template.replace("{message}", message)
        extended = draft.with_environment(context.user_turn(text, after=draft.tokens))
        return extended if context.num_tokens_left(extended.tokens) > 0 else None
