"""The parts of workers, by role: assembled on the worker, from the run directory alone.

A worker that starts late or again finds everything it needs there: recipe, model, newest weights.

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
from areal_flow.config import Recipe, load_recipe
from areal_flow.errors import ArealFlowError, EngineError, RewardError
from areal_flow.generation.protocol import Engine
from areal_flow.generation.registry import engine_factory
from areal_flow.import_path import import_function
from areal_flow.layout import RunLayout
from areal_flow.models.directory import stop_token_ids, tokenizer_of
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.types import Completion, EngineStats, Episode, GroupRequest, Prompt, Sampling, Score
from areal_flow.weights.directory import DirectoryReader
from areal_flow.workflows.group import RolledOutGroup, all_of, run_group
from areal_flow.workflows.registry import load_workflow

MID_EPISODE_PRIORITY = 10
"""Of tasks that an episode waits for, over those that only follow one."""


class GeneratorRole:
    """A generator worker's engine: made on first use, brought to the newest weights on demand."""

    def __init__(self, run_directory: Path, writer_epoch: int, name: str) -> None:
        self.name = name
        self._layout = RunLayout(run_directory)
        self._recipe = load_recipe(self._layout.config)
        self._reader = DirectoryReader(self._layout.weights_of(writer_epoch))
        self._loading = asyncio.Lock()
        self._engine: Engine | None = None
        generation = self._recipe.generation
        self.sampling = Sampling(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            stop_token_ids=stop_token_ids(self._layout.model),
        )

    @property
    def policy_version(self) -> int | None:
        return self._engine.version if self._engine else None

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine; one that is being made will load what is newest then."""
        return self._engine is not None and not self._engine.broken

    async def serve(self, version: int) -> Engine:
        """Return the engine once it serves `version` or a later one; a new one, the newest.

        Raises:
            WeightsError: the published weights are not what was published.
        """
        async with self._loading:
            if self._engine is None or self._engine.broken:
                self.close()
                generation = self._recipe.generation
                start = await asyncio.to_thread(engine_factory, generation.engine)
                self._engine = await start(self._layout.model, generation, self._reader)
                version = max(version, self._reader.newest())
            if self._engine.version < version:
                await self._engine.load_weights(self._reader.newest(), self._reader)
            return self._engine

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine else EngineStats()

    def close(self) -> None:
        """Close the engine, if there is one: a broken one before it is replaced, any at the end."""
        if self._engine:
            self._engine.close()
            self._engine = None


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


class RewardRole:
    """A reward worker's tokenizer and rewards: opened when it is made, closed with its worker."""

    def __init__(self, run_directory: Path) -> None:
        layout = RunLayout(run_directory)
        self._tokenizer = tokenizer_of(layout.model)
        self._rewards = WeightedRewards(load_recipe(layout.config).rewards, layout.rewards)
        self._rewards.open()

    @property
    def verifier_identity(self) -> str:
        return self._rewards.identity

    async def score(self, completions: Sequence[tuple[Prompt, Sequence[int]]]) -> Sequence[Score]:
        """Score completions, each of its prompt, decoded without special tokens."""
        texts = self._tokenizer.decode_batch([list(tokens) for _, tokens in completions])
        return await self._rewards.score(
            [
                RewardInput(prompt.text, text, prompt.answer, prompt.metadata)
                for (prompt, _), text in zip(completions, texts, strict=True)
            ]
        )

    def close(self) -> None:
        """Close the rewards."""
        self._rewards.close()


def recipe_of(run_directory: Path) -> Recipe:
    """Return the recipe that a run was started with."""
    return load_recipe(RunLayout(run_directory).config)


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
