"""One completion a member, scored when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from areal_flow.core.settings import Settings
from areal_flow.core.types import Prompt
from areal_flow.rollout.workflows.context import EpisodeContext
from areal_flow.rollout.workflows.protocol import TrajectoryDraft


class SingleTurn(Settings):
    """Question and answer."""

    name: Literal["single_turn"] = "single_turn"
    """The kind of episode; each workflow has its own settings."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        completion = await context.generate(prompt.tokens, turn=0)
        return [TrajectoryDraft(prompt.tokens).with_completion(completion)]
