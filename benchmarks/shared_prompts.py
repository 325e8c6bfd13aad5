"""What it saves to compute a prompt once for all of its completions in a micro-batch.

A training step (one update, 0.6M parameters, one thread) on groups whose completions have one
prompt, and on as many trajectories of the same lengths that have a prompt each. The two take turns;
the best round counts.

    python -m benchmarks.shared_prompts [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.config import TrainerSettings
from areal_flow.models.policy import policy_from_config
from areal_flow.trainer.replicated import ReplicatedBackend
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import VersionSpan
from benchmarks.tailed_load import MODELS

GROUP_SIZE = 16
MAX_TOKENS = 8192
SHAPES = ((8, 8, 32), (64, 128, 8), (256, 128, 4), (512, 64, 4), (32, 256, 8))
"""Tokens of a prompt, mean tokens of a completion, and groups."""


@dataclass(frozen=True)
class Saved:
    """Trained tokens a second."""

    num_prompt_tokens: int
    num_completion_tokens: int
    shared: float
    apart: float


def trajectories(
    num_prompt: int, num_completion: int, num_groups: int, vocabulary: int
) -> list[TrainingSequence]:
    drawn = np.random.default_rng(0)
    found = []
    for group in range(num_groups):
        prompt = drawn.integers(0, vocabulary, num_prompt)
        for _ in range(GROUP_SIZE):
            length = int(drawn.integers(num_completion // 2, num_completion * 3 // 2))
            found.append(
                TrainingSequence(
                    prompt_tokens=prompt,
                    output_tokens=drawn.integers(0, vocabulary, length),
                    behavior_logprobs=np.full(length, -np.log(vocabulary), np.float32),
                    trained=np.ones(length, np.bool_),
                    reward=float(drawn.integers(0, 2)),
                    group=group,
                    version_spans=(VersionSpan(0, length),),
                )
            )
    return found


def with_own_prompts(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Return sequences of the same lengths, of which no two share a prompt."""
    return [
        replace(s, prompt_tokens=np.random.default_rng(index).permutation(s.prompt_tokens))
        for index, s in enumerate(sequences)
    ]


def compare(shape: tuple[int, int, int], rounds: int) -> Saved:
    config = MODELS["0.6M"]
    sequences = trajectories(*shape, config.vocab_size)
    ways = {"shared": sequences, "apart": with_own_prompts(sequences)}
    settings = StepSettings(DecoupledPPO(num_minibatches=1), temperature=1.0, seed=0)
    torch.manual_seed(0)
    trainer = TrainerSettings(learning_rate=1e-9, tokens_per_micro_batch=MAX_TOKENS)
    backend = ReplicatedBackend(policy_from_config(config), trainer)
    best = dict.fromkeys(ways, np.inf)
    for step in range(rounds + 1):  # the first one prepares
        for way, given in ways.items():
            began = perf_counter()
            train_step(backend, given, step=1, settings=settings)
            if step:
                best[way] = min(best[way], perf_counter() - began)
    num_tokens = sum(s.num_trained for s in sequences)
    return Saved(shape[0], shape[1], num_tokens / best["shared"], num_tokens / best["apart"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [compare(shape, arguments.rounds) for shape in SHAPES]
    table = Table(title=f"Trained tokens a second, groups of {GROUP_SIZE}")
    for label in ("prompt", "completion", "shared", "apart", "gain"):
        table.add_column(label, justify="right")
    for saved in found:
        lengths = (f"{saved.num_prompt_tokens}", f"{saved.num_completion_tokens}")
        speeds = (f"{saved.shared:,.0f}", f"{saved.apart:,.0f}")
        table.add_row(*lengths, *speeds, f"{saved.shared / saved.apart:.2f}")
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(saved) for saved in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
