"""Trains the default policy on data of a given age in one process; used by three experiments.

Every batch is sampled by the policy of exactly eta versions before (of version 0 until there are so
many): the worst that `controller.max_staleness = eta` allows. The policy is the default job's after
fine-tuning; engine, verifier, trainer and algorithms are the project's own. The pass rate is of
1,024 held-out prompts, one sample each, after the last step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from areal_flow import open_run
from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config import Recipe, load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Completion, GroupRequest, Sampling
from areal_flow.log.directory import create_run
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.policy.tokenizer.directory import stop_token_ids
from areal_flow.rewards.math.reward import verify_numeric
from areal_flow.rollout.engines.torch_engine import TorchEngine
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.settings import StepSettings
from areal_flow.training.step import train_step
from benchmarks import harness
from benchmarks.schedule import make_warm_model
from pipelines.jobs.job import DEFAULT_RECIPE
from pipelines.jobs.prepare import prepare_run

OPTIONS = {"seeds": [0, 1, 2], "samples": 2560, "learning_rate": 2e-5, "model": Path}
"""`samples`: trajectories that each run trains, whatever its batch. `model`: the fine-tuned policy,
which is made first if it is not given."""
QUICK = {"seeds": [0, 1], "samples": 256}
BATCH_SIZE, GROUP_SIZE, MINIBATCH_SIZE, WARM_UP, NUM_HELD_OUT = 128, 16, 32, 640, 1024
"""In trajectories."""
Question = tuple[np.ndarray, str]  # tokens of a prompt, and its answer


@dataclass(frozen=True)
class Setting:
    """The settings in which a run differs from the others."""

    algorithm: Mapping[str, Any]
    """Its name, and settings of its own."""
    eta: float
    batch_size: int = BATCH_SIZE


@dataclass(frozen=True)
class Task:
    """The warm policy and its prompts."""

    model: Path
    recipe: Recipe
    train: Sequence[Question]
    held_out: Sequence[Question]
    tokenizer: Tokenizer
    num_samples: int

    def reward(self, question: Question, completion: Completion) -> float:
        text = self.tokenizer.decode(completion.tokens.tolist())
        return verify_numeric(prompt="", completion=text, answer=question[1]).reward or 0.0

    def sample(
        self, engine: TorchEngine, questions: Sequence[Question], size: int, seed: int
    ) -> list[list[Completion]]:
        """Return `size` completions of each question."""
        stop = stop_token_ids(self.model)
        sampling = Sampling(self.recipe.generation.max_new_tokens, stop_token_ids=stop)
        completions: dict[str, list[Completion]] = {}
        for index, question in enumerate(questions):
            seeds = tuple(seed + index * size + member for member in range(size))
            engine.add(GroupRequest(f"{index}", question[0], seeds, sampling))
        while engine.has_work():
            completions.update(engine.step())
        return [completions[f"{index}"] for index in range(len(questions))]

    def pass_rate(self, engine: TorchEngine) -> float:
        answers = self.sample(engine, self.held_out, 1, seed=10**9)
        return fmean(self.reward(q, c) for q, (c,) in zip(self.held_out, answers, strict=True))


def pass_rates(settings: Mapping[str, Setting], chosen: Any) -> dict[str, list[float]]:
    """Train each setting with each seed; return the pass rates by seed."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-science-") as scratch:
        task = prepare(Path(scratch), chosen)
        calls = [(task, each, seed) for each in settings.values() for seed in chosen.seeds]
        rates = iter(
            harness.in_processes(
                learn, calls, {"OMP_NUM_THREADS": "1"}, num_processes=chosen.processes
            )
        )
    return {name: [next(rates) for _ in chosen.seeds] for name in settings}


def prepare(cwd: Path, chosen: Any) -> Task:
    """Return the policy and the prompts of the default recipe."""
    model = (chosen.model or make_warm_model(cwd)).resolve()
    given = {
        "model": f"{model}",
        "sft": {"num_steps": 0},
        "prompts": {"num_prompts": 4000, "num_held_out": NUM_HELD_OUT},
        "controller": {"group_size": GROUP_SIZE},
        "trainer": {"learning_rate": chosen.learning_rate},
    }
    recipe, layout = load_recipe(DEFAULT_RECIPE, given), RunLayout(cwd / "prompts")
    create_run(layout, recipe)
    prepare_run(layout, recipe)
    run = open_run(layout.root)
    tokenizer = Tokenizer.from_file(f"{model / 'tokenizer.json'}")
    train, held_out = (
        [(np.array(tokenizer.encode(text).ids), answer) for text, answer in rows]
        for rows in (harness.questions(run, name) for name in ("train", "held_out"))
    )
    return Task(model, recipe, train, held_out, tokenizer, chosen.samples)


def learn(task: Task, setting: Setting, seed: int) -> float:
    """Train on `num_samples` trajectories; return the held-out pass rate."""
    torch.set_num_threads(1)
    batch_size = setting.batch_size
    task = replace(task, recipe=_recipe_of(task.recipe, batch_size))
    algorithm = ALGORITHMS[setting.algorithm["name"]](
        **{"advantage": task.recipe.algorithm.advantage, **setting.algorithm},
        num_minibatches=batch_size // MINIBATCH_SIZE,
    )
    settings = StepSettings(algorithm, task.recipe.generation.temperature, seed)
    backend = TrainerBackend(load_policy(task.model), task.recipe.trainer)
    engine = TorchEngine(load_policy(task.model), task.recipe.generation, version=0)
    versions, num_steps = [weights_of(backend)], task.num_samples // batch_size
    for step in range(1, num_steps + 1):
        version = int(max(0, step - 1 - setting.eta))
        engine.load_weights(versions[version], version=version)
        train_step(backend, sample_batch(task, engine, seed, step), step=step, settings=settings)
        versions.append(weights_of(backend))
    engine.load_weights(versions[-1], version=num_steps)
    return task.pass_rate(engine)


def _recipe_of(recipe: Recipe, batch_size: int) -> Recipe:
    """Return a recipe with this batch size, whose warm-up covers the same number of samples."""
    warm_up = {"num_warmup_steps": WARM_UP // batch_size}
    controller = recipe.controller.model_copy(update={"batch_size": batch_size})
    trainer = recipe.trainer.model_copy(update=warm_up)
    return recipe.model_copy(update={"controller": controller, "trainer": trainer})


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
    return {name: tensor.clone() for name, tensor in policy_tensors(backend.policy).items()}
