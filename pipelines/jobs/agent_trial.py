"""Runs one episode of a user's workflow as a generator will, in a process of its own.

The policy always generates the answer of the prompt's row, or its prompt if it has none, and every
reward is 0, so the trial needs neither weights nor reward workers. The result is a JSON file.

    python -m pipelines.jobs.agent_trial RUN_DIRECTORY OUTPUT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from areal_flow.cluster.generator_tasks import GeneratorRole
from areal_flow.cluster.reward_tasks import call_tool
from areal_flow.cluster.worker import WorkerContext
from areal_flow.core.failures import cause_of
from areal_flow.core.layout import RunLayout
from areal_flow.core.settings import search_here_last
from areal_flow.core.types import (
    Completion,
    Episode,
    GroupRequest,
    Prompt,
    Score,
    Tokens,
    VersionSpan,
    as_tokens,
)
from areal_flow.rewards.trial import trial_completion
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.agent_messages import CallRefused
from areal_flow.rollout.workflows.episode import contexts_of

LIMIT_S = 60.0
"""A longer episode is cancelled, which is no error of the workflow."""
NO_WRITER = 0


@dataclass
class Trial:
    """The result of one episode."""

    completion: str = "answer"
    """What of its row the policy generates."""
    num_answers: int = 0
    rewards: tuple[float | None, ...] = ()
    seconds: float = 0.0
    error: str = ""
    is_wrong: bool = False
    """Whether the workflow has this error whatever the policy generates."""


class StandIn(GeneratorRole):
    """A generator whose policy always generates the same text."""

    def __init__(self, context: WorkerContext, answer: str) -> None:
        super().__init__(context)
        self._answer = as_tokens([*self.encode(answer), *self.sampling.stop_token_ids[:1]])
        self.num_answers = 0

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        tokens = self._answer[: request.sampling.max_new_tokens]
        spans = (VersionSpan(0, len(tokens)),)
        is_complete = len(tokens) == len(self._answer)
        logprobs = np.zeros(len(tokens), np.float32)
        completion = Completion(tokens, logprobs, spans, "stop" if is_complete else "length")
        self.num_answers += len(request.seeds)
        if request.on_token is not None:
            for index in range(len(request.seeds)):
                for token in tokens.tolist():
                    request.on_token(index, token)
        return [completion] * len(request.seeds)

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        return [Score(0.0)] * len(completions)

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return await asyncio.to_thread(call_tool, path, calls)


async def try_episode(layout: RunLayout) -> Trial:
    context = WorkerContext(layout.root, NO_WRITER)
    prompt = PromptTable(layout.train_prompts, seed=context.recipe.seed).row(0)
    policy = StandIn(context, trial_completion(prompt.answer, prompt.text))
    episode = Episode(0, prompt, (0,), 0, NO_WRITER, datetime.now(UTC))
    (member,) = contexts_of(episode, policy)
    trial, began = Trial("prompt" if prompt.answer is None else "answer"), perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S) as limit:
            drafts = await policy.workflow.run(prompt, member)
        trial.rewards = tuple(draft.score.reward if draft.score else None for draft in drafts)
        trial.is_wrong = not drafts
        trial.error = "" if drafts else "expected a trajectory, found none"
    except Exception as error:  # noqa: BLE001 - the user's
        is_late = limit.expired()
        trial.error = f"no end within {LIMIT_S:g} s" if is_late else cause_of(error)
        trial.is_wrong = not is_late and (isinstance(error, CallRefused) or not policy.num_answers)
    trial.num_answers, trial.seconds = policy.num_answers, perf_counter() - began
    return trial


def main(run_directory: Path, output: Path) -> None:
    trial = asyncio.run(try_episode(RunLayout(run_directory)))
    output.write_text(json.dumps(asdict(trial)) + "\n")


if __name__ == "__main__":
    search_here_last()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
