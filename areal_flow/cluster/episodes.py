"""Workflows on a generator worker: its engine completes, reward workers score and call tools.

| who                    | waits for                | unblocked by                           |
|------------------------|--------------------------|----------------------------------------|
| an episode             | completions              | this worker's engine                   |
| an episode             | a score, a tool's result | a task on a reward worker              |
| a reward worker's task | its resource             | the task before it, which never waits  |
|                        |                          | for an episode: nothing can deadlock   |

Such a task runs again elsewhere if its worker dies; it is forgotten if its episode's worker dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed import Client, get_client

from areal_flow.cluster.results import result_of
from areal_flow.cluster.worker_context import WorkerContext, holder
from areal_flow.cluster.worker_roles import GeneratorRole, RewardRole, recipe_of
from areal_flow.errors import ArealFlowError, EngineError, RewardError
from areal_flow.import_path import import_function
from areal_flow.layout import RunLayout
from areal_flow.models.directory import tokenizer_of
from areal_flow.types import Completion, Episode, GroupRequest, Prompt, Score
from areal_flow.workflows.group import RolledOutGroup, all_of, run_group
from areal_flow.workflows.registry import load_workflow

MID_EPISODE_PRIORITY = 10
"""Of tasks that an episode waits for, over those that only follow one."""


class EpisodeRole:
    """A generator worker's workflow, and the `EpisodeServices` of its episodes."""

    def __init__(self, run_directory: Path, generator: GeneratorRole) -> None:
        recipe = recipe_of(run_directory)
        self.sampling = generator.sampling
        self.max_model_len = recipe.generation.max_model_len
        self._generator = generator
        self._workflow = load_workflow(recipe.workflow)
        self._tokenizer = tokenizer_of(RunLayout(run_directory).model)
        self._version = 0

    async def run_groups(
        self, episodes: Sequence[Episode], version: int
    ) -> Sequence[RolledOutGroup]:
        """Run some groups side by side, with weights of `version` or later.

        Raises:
            EngineError, WeightsError: the generator cannot serve.
        """
        self._version = max(self._version, version)
        return await all_of(run_group(self._workflow, episode, self) for episode in episodes)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        engine = await self._generator.serve(self._version)
        return await engine.generate(request)

    async def score(
        self, prompt: Prompt, completions: Sequence[tuple[int, ...]]
    ) -> Sequence[Score]:
        scores: Sequence[Score] = await _on_reward_worker(score_completions, prompt, completions)
        return scores

    async def call_tool(self, path: str, arguments: tuple[Any, ...]) -> Any:
        return await _on_reward_worker(call_tool, path, arguments)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(tokens))


async def _on_reward_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task elsewhere; one that kills its worker again and again fails the member only."""
    client: Client = get_client()
    future = client.submit(
        function,
        *arguments,
        pure=False,
        resources={"reward": 1},
        priority=MID_EPISODE_PRIORITY,
    )
    try:
        return await result_of(future)
    except EngineError as error:
        raise RewardError(str(error)) from error
    finally:
        future.release()


async def score_completions(
    prompt: Prompt, completions: Sequence[Sequence[int]]
) -> Sequence[Score]:
    """Score completions in the middle of an episode, as a task on a reward worker."""
    role = await reward_role(holder())
    return await role.score([(prompt, tokens) for tokens in completions])


def call_tool(path: str, arguments: tuple[Any, ...]) -> Any:
    """Call the function at an import path, as a task on a reward worker, in a thread.

    Raises:
        ArealFlowError: it cannot be imported.
    """
    return import_function(path, setting="a tool", error=ArealFlowError)(*arguments)


async def reward_role(of: WorkerContext) -> RewardRole:
    """Return this reward worker's role; its rewards may take their time to be opened."""
    if (role := of.get(RewardRole)) is not None:
        return role
    return await asyncio.to_thread(of.ensure, RewardRole, lambda: RewardRole(of.run_directory))
