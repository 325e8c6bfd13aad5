"""Tasks with tests: the policy works in the sandbox of a task, whose own tests give the reward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from areal_flow.core.errors import PromptError
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens
from areal_flow.rollout.workflows.episode import EpisodeContext, TrajectoryDraft
from areal_flow.rollout.workflows.sandbox_tools import EpisodeSandbox
from areal_flow.rollout.workflows.tool_use import WithTools
from areal_flow.sandboxes.harbor import HarborTask
from areal_flow.sandboxes.registry import SandboxSettings

TASK = "task"
"""The column of prompts with the name of the task's folder."""
TASKS = "tasks"
"""The folder of a run's own tasks, beside its shipped functions."""


class SandboxTask(WithTools):
    """Works in the sandbox of a task, whose tests give the reward."""

    name: Literal["sandbox"] = "sandbox"
    """What an episode is; each workflow has its own settings."""
    tools: tuple[str, ...] = Field(("bash",), min_length=1, strict=False)
    sandbox: SandboxSettings = SandboxSettings()
    max_calls: int = Field(16, ge=0)
    tasks: str = ""
    """The folder of the tasks that the column `task` names; empty: the run's copies of those of the
    source `harbor:FOLDER`."""

    @property
    def gives_rewards(self) -> bool:
        return True

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, with the reward of the task's tests."""
        task = HarborTask(self._folder(prompt))
        settings = task.settings(self.sandbox)
        furnish = partial(task.furnish, provider=settings.provider)
        async with EpisodeSandbox(settings, context, prompt, furnish) as sandbox:

            async def judge(_: Tokens) -> Score:
                result = await task.judge(await sandbox.started())
                parts = tuple(RewardPart(name, number) for name, number in result.rewards.items())
                return Score(result.reward, message=result.shown(), parts=parts)

            limit_s = min(self.episode_timeout_s, task.agent_timeout_s or self.episode_timeout_s)
            limited = self.model_copy(update={"episode_timeout_s": limit_s})
            return [await limited.episode(prompt, context, sandbox, judge)]

    def _folder(self, prompt: Prompt) -> Path:
        if not (name := prompt.metadata.get(TASK)):
            raise PromptError(
                f"prompt {prompt.prompt_id}: it has no column {TASK!r}, which the workflow "
                "'sandbox' needs: take prompts.source = 'harbor:FOLDER'"
            )
        return Path(self.tasks) / str(name)
