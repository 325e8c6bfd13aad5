"""What stale data does to learning, with and without the decoupled objective (the paper's Table 2).

Every batch is sampled by the policy of exactly eta versions before (of version 0 until there are so
many): the worst that `controller.max_staleness = eta` allows. `inf` samples all batches with
version 0. The policy is the default job's after fine-tuning; engine, verifier, trainer and
algorithms are the project's own, in one process of one thread.

The pass rate is of 1,024 held-out prompts, one sample each, after `--early` steps and after the
last one: the mean of the seeds, with the 95% interval of Student's t over them. With `--endless`
completions have `max_new_tokens`, whatever the policy writes, so that it has farther to go.

    python -m benchmarks.staleness [--etas 0 1 2 4 8 16 inf] [--seeds 0 1 2] [--steps 100]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config import Recipe, load_recipe
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.policy import load_policy
from areal_flow.rewards.numeric import verify_numeric
from areal_flow.tokenizer.directory import stop_token_ids
from areal_flow.trainer.backend import TrainerBackend
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import Completion, GroupRequest, Sampling
from benchmarks import harness
from benchmarks.schedule import make_warm_model

OBJECTIVES = {"decoupled": "decoupled_ppo", "ppo": "ppo"}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of 95%, by the number of seeds
ETAS = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, inf]
NUMBERS = {"steps": 100, "early": 20, "learning_rate": 2e-5}
Question = tuple[np.ndarray, str]  # tokens of a prompt, and its answer


@dataclass(frozen=True)
class Task:
    """The warm policy and its prompts."""

    model: Path
    recipe: Recipe
    train: Sequence[Question]
    held_out: Sequence[Question]
    tokenizer: Tokenizer
    stop: tuple[int, ...]

    def reward(self, question: Question, completion: Completion) -> float:
        text = self.tokenizer.decode(completion.tokens.tolist())
        return verify_numeric(prompt="", completion=text, answer=question[1]).reward or 0.0

    def sample(
        self, engine: TorchEngine, questions: Sequence[Question], size: int, seed: int
    ) -> list[list[Completion]]:
        """Return `size` completions of each question."""
        sampling = Sampling(self.recipe.generation.max_new_tokens, stop_token_ids=self.stop)
        found: dict[str, list[Completion]] = {}
        for index, question in enumerate(questions):
            seeds = tuple(seed + index * size + member for member in range(size))
            engine.add(GroupRequest(f"{index}", question[0], seeds, sampling))
        while engine.has_work():
            found.update(engine.step())
        return [found[f"{index}"] for index in range(len(questions))]

    def pass_rate(self, engine: TorchEngine) -> float:
        answers = self.sample(engine, self.held_out, 1, seed=10**9)
        return fmean(self.reward(q, c) for q, (c,) in zip(self.held_out, answers, strict=True))


def prepare(cwd: Path, chosen: argparse.Namespace) -> Task:
    """Take the policy and the prompts of the default job."""
    model = (chosen.model or make_warm_model(cwd)).resolve()
    untrained = {"sft.num-steps": 0, "num-steps": 0, "prompts.num-held-out": 1024}
    run = harness.train(cwd, "prompts", {"model": model, **untrained})
    overrides = {
        "controller": {"batch_size": 128, "group_size": 16},
        "algorithm": {"num_minibatches": 4},
        "trainer": {"learning_rate": chosen.learning_rate},
    }
    recipe = load_recipe(run.layout.config, overrides)
    tokenizer = Tokenizer.from_file(f"{model / 'tokenizer.json'}")
    train, held_out = (
        [(np.array(tokenizer.encode(text).ids), answer) for text, answer in rows]
        for rows in (harness.questions(run, name) for name in ("train", "held_out"))
    )
    stop = () if chosen.endless else stop_token_ids(model)
    return Task(model, recipe, train, held_out, tokenizer, stop)


def learn(
    task: Task, objective: str, eta: float, seed: int, chosen: argparse.Namespace
) -> tuple[dict[int, float], float]:
    """Train; return the held-out pass rate by step, and the mean share of clipped tokens."""
    recipe = task.recipe
    shared = recipe.algorithm.model_dump(include={"advantage", "num_minibatches"})
    algorithm = ALGORITHMS[OBJECTIVES[objective]](**shared)
    settings = StepSettings(algorithm, recipe.generation.temperature, seed)
    backend = TrainerBackend(load_policy(task.model), recipe.trainer)
    engine = TorchEngine(load_policy(task.model), recipe.generation, version=0)
    versions = [weights_of(backend)]
    pass_rates: dict[int, float] = {}
    clipped: list[float] = []
    for step in range(1, chosen.steps + 1):
        version = int(max(0, step - 1 - eta))
        engine.load_weights(versions[version], version=version)
        sequences = sample_batch(task, engine, seed, step)
        numbers = train_step(backend, sequences, step=step, settings=settings)
        clipped.append(numbers.metrics["clip_fraction"].value)
        versions.append(weights_of(backend))
        if step in (chosen.early, chosen.steps):
            engine.load_weights(versions[-1], version=step)
            pass_rates[step] = task.pass_rate(engine)
    return pass_rates, fmean(clipped)


def sample_batch(task: Task, engine: TorchEngine, seed: int, step: int) -> list[TrainingSequence]:
    drawn = np.random.default_rng([seed, step])
    places = drawn.choice(len(task.train), task.recipe.groups_per_step, replace=False)
    questions = [task.train[place] for place in places]
    size, first_seed = task.recipe.controller.group_size, (seed * 10**4 + step) * 10**4
    answers = task.sample(engine, questions, size, first_seed)
    return [
        TrainingSequence(
            question[0],
            completion.tokens,
            completion.logprobs,
            np.ones(len(completion.tokens), bool),
            task.reward(question, completion),
            group,
            completion.version_spans,
        )
        for group, (question, members) in enumerate(zip(questions, answers, strict=True))
        for completion in members
    ]


def weights_of(backend: TrainerBackend) -> dict[str, torch.Tensor]:
    return {name: rows.values for name, rows in backend.save()[0].items()}


def interval(values: Sequence[float]) -> str:
    """Return the mean, and half the width of its 95% interval."""
    half = STUDENT_T[len(values)] * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{fmean(values):.3f} ± {half:.3f}"


def row_of(task: Task, eta: float, chosen: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"eta": f"{eta:g}"}
    for objective in OBJECTIVES:
        runs = [learn(task, objective, eta, seed, chosen) for seed in chosen.seeds]
        for step in runs[0][0]:
            row[f"step {step}, {objective}"] = interval([rates[step] for rates, _ in runs])
        row[f"clipped, {objective}"] = fmean(clipped for _, clipped in runs)
    return row


def main() -> None:
    others = {"seeds": [0, 1, 2], "endless": False, "model": Path}
    chosen = harness.parse_options(__doc__, etas=ETAS, **NUMBERS, **others)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="areal-flow-staleness-") as scratch:
        task = prepare(Path(scratch), chosen)
        rows = [row_of(task, eta, chosen) for eta in chosen.etas]
    title = ", ".join(f"{name} {getattr(chosen, name)}" for name in (*NUMBERS, "endless"))
    harness.report(chosen.json, {f"Held-out pass rate: {title}": rows})


if __name__ == "__main__":
    main()
