"""Groups of completions with given, heavy-tailed lengths, and models to sample them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_flow.core.types import GroupRequest, Prompt, Sampling
from areal_flow.rollout.engines.protocol import EngineCore, GenerationSettings
from areal_flow.rollout.engines.scheduler import SampledSequence
from areal_flow.rollout.workflows.episode import EpisodeContext, TrajectoryDraft
from benchmarks.shapes import qwen2_config

PROMPT_TOKENS = 32
GROUP_SIZE = 8
MODELS = {
    "0.6M": qwen2_config(1024, 128, 2, heads=2, key_value_heads=2, max_position_embeddings=4096),
    "11M": qwen2_config(4096, 384, 5, heads=6, key_value_heads=2, max_position_embeddings=4096),
}


@dataclass(frozen=True)
class Load:
    """Prompts and the length of each completion."""

    prompts: np.ndarray
    lengths: np.ndarray
    """`[groups, GROUP_SIZE]`."""

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def request(self, group: int) -> GroupRequest:
        seeds = tuple(range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE))
        return GroupRequest(f"{group}", self.prompts[group], seeds, Sampling(self.longest))


@dataclass(frozen=True)
class Lengths:
    """Completion lengths in tokens: lognormal, at least 8 and at most `cut`."""

    median: int
    sigma: float
    cut: int

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...] = ()) -> np.ndarray:
        drawn = rng.lognormal(np.log(self.median), self.sigma, shape)
        return np.clip(drawn, 8, self.cut).astype(np.int64)


MODERATE = Lengths(median=120, sigma=1.0, cut=1024)
"""198 tokens in the mean before the cut."""
TAILS = Lengths(median=75, sigma=1.5, cut=2048)
"""204 tokens in the mean; one of 70 is cut, so that most batches of 64 have one that is."""


@dataclass(frozen=True)
class GivenLengths(Lengths):
    """A `Workflow` of one completion whose length is drawn from the member's seed."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, of this length if the policy never samples a stop token."""
        length = int(self.draw(np.random.default_rng(context.seed)))
        completion = await context.generate(prompt.tokens, turn=0, max_new_tokens=length)
        return [TrajectoryDraft(prompt.tokens).with_completion(completion)]


def random_load(num_groups: int, lengths: Lengths, vocabulary: int, *, seed: int = 0) -> Load:
    rng = np.random.default_rng(seed)
    drawn = lengths.draw(rng, (num_groups, GROUP_SIZE))
    return Load(rng.integers(1, vocabulary, (num_groups, PROMPT_TOKENS)), drawn)


def settings_for(load: Load, max_num_seqs: int, **others: Any) -> GenerationSettings:
    """Return engine settings that fit the longest completion of the load."""
    sizes = {"max_new_tokens": load.longest, "max_model_len": PROMPT_TOKENS + load.longest}
    return GenerationSettings(max_num_seqs=max_num_seqs, **{**sizes, **others})


def add_all(engine: EngineCore, load: Load) -> None:
    for group in range(len(load.prompts)):
        engine.add(load.request(group))


def run_all(engine: EngineCore, load: Load) -> None:
    add_all(engine, load)
    num_tokens = 0
    while engine.has_work():
        num_tokens += sum(len(c.tokens) for _, group in engine.step() for c in group)
    assert num_tokens == load.lengths.sum()


take_next = SampledSequence.append


def end_at_given_lengths(load: Load) -> list[int]:
    """End each member of this process's groups at its own length, so that all ways work alike.

    Returns:
        A list whose one value counts the tokens that are sampled from here on.
    """
    limit = {f"{group}": lengths for group, lengths in enumerate(load.lengths.tolist())}
    num_sampled = [0]

    def append(sequence: SampledSequence, token: int, logprob: float, version: int) -> None:
        take_next(sequence, token, logprob, version)
        num_sampled[0] += 1
        ended = len(sequence.tokens) >= limit[sequence.request.request_id][sequence.index]
        sequence.finish_reason = "length" if ended else None

    SampledSequence.append = append  # type: ignore[method-assign, assignment]
    return num_sampled
