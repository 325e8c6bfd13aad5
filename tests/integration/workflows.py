"""A workflow and an agent for tests, named by import path in recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from areal_flow.core.types import Prompt
from areal_flow.rollout.workflows.episode import EpisodeContext, TrajectoryDraft
from areal_flow.rollout.workflows.turns import SingleTurn
from areal_flow.sandboxes.registry import SandboxSettings


class CountsWords:
    """Lets a tool count the words of an answer; the policy continues after the count."""

    def __init__(self, *, least: int) -> None:
        self.least = least

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory; fail where the tool refuses the answer."""
        draft = TrajectoryDraft(prompt.tokens).with_completion(
            await context.generate(prompt.tokens, turn=0)
        )
        text = context.decode(draft.output_tokens)
        number = await context.call_tool(
            "tests.integration.verifiers:count_words", text, self.least
        )
        extended = draft.with_environment(context.encode(f" {number}"))
        return [extended.with_completion(await context.generate(extended.tokens, turn=1))]


class CountsInItsSandbox:
    """Has the shell of a sandbox count the letters of an answer, and what it has counted before."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory of three completions."""
        draft = TrajectoryDraft(prompt.tokens)
        async with context.sandbox(SandboxSettings(num_processes=16)) as sandbox:
            await sandbox.run("(setsid sleep 600 &); total=0", timeout_s=60)
            for turn in range(3):
                draft = draft.with_completion(await context.generate(draft.tokens, turn))
                await sandbox.write_file("answer", context.decode(draft.output_tokens).encode())
                count = "total=$((total + $(wc -c < answer))); echo $total"
                result = await sandbox.run(count, timeout_s=60)
                if turn < 2:
                    draft = draft.with_environment(context.encode(f" {result.output.strip()}"))
        return [draft]


class FailsForSome(SingleTurn):
    """A single turn; fails for one question in ten, and for some answers to another."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory; fail for answers that end in 7, and for members by their 3."""
        if prompt.answer.endswith("7"):
            raise LookupError(f"no page about {prompt.answer}")
        drafts = await super().run(prompt, context)
        if prompt.answer.endswith("3") and len(drafts[0].output_tokens) % 2:
            raise LookupError(f"half a page about {prompt.answer}")
        return drafts


async def asks_twice(question: str, base_url: str, api_key: str) -> float:
    """Ask for an answer and then for a better one, with the OpenAI SDK."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(2):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=6
            )
            message = completion.choices[0].message
            messages += [message.model_dump(), {"role": "user", "content": "Better?"}]
    return len(message.content or "") / 50
