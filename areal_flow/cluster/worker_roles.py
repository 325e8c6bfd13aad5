"""The parts of workers, by role: assembled on the worker, from the run directory alone.

A worker that starts late or again finds everything it needs there: recipe, model, newest weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from areal_flow.config import Recipe, load_recipe
from areal_flow.generation.protocol import Engine
from areal_flow.generation.registry import engine_factory
from areal_flow.layout import RunLayout
from areal_flow.models.directory import stop_token_ids, tokenizer_of
from areal_flow.rewards.protocol import RewardInput
from areal_flow.rewards.weighted import WeightedRewards
from areal_flow.types import (
    EngineStats,
    Prompt,
    Sampling,
    Score,
)
from areal_flow.weights.directory import DirectoryReader


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
