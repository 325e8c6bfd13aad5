"""What stale data does to learning, with and without the decoupled objective (the paper's Table 2).

Every batch is sampled by the policy of exactly eta versions before (of version 0 until there are so
many): the worst that `controller.max_staleness = eta` allows, since a run's own staleness depends
on the machine and stays lower. `inf` samples all batches with version 0. The policy is the default
job's after fine-tuning; engine, verifier, trainer and algorithms are the project's own, in one
process of one thread. At eta 0 both objectives clip around the policy before the step.

The pass rate is of 1,024 held-out prompts, one sample each, after the first `--every` steps and
after the last one: the mean of the seeds, with the 95% interval of Student's t over them. With
`--endless` completions have `max_new_tokens`, whatever the policy writes: it begins with a pass
rate of a few percent, and has farther to go. tokens/s are of `areal-flow train` at this
`max_staleness`, with `--flow-steps`.

    python -m benchmarks.staleness [--etas 0 1 2 4 8 16 inf] [--seeds 0 1 2] [--steps 100]
        [--json FILE] [--plot FILE]

A file of `--json` that is there is continued: what it has is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import areal_flow
from areal_flow.algorithms.registry import ALGORITHMS
from areal_flow.config import Recipe, load_recipe
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.directory import stop_token_ids
from areal_flow.models.policy import load_policy
from areal_flow.rewards.numeric import verify_numeric
from areal_flow.trainer.backend import TrainerBackend, make_backend
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import Completion, GroupRequest, Sampling
from benchmarks.plots import draw_staleness
from benchmarks.schedule import make_model
from benchmarks.schedule_comparison import train

OBJECTIVES = {"decoupled": "decoupled_ppo", "ppo": "ppo"}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Of 95%, by the number of seeds."""


@dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray
    answer: str


@dataclass(frozen=True)
class Job:
    """The warm policy and its prompts."""

    model: Path
    recipe: Recipe
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    tokenizer: Tokenizer
    stop: tuple[int, ...]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        text = self.tokenizer.decode(completion.tokens.tolist())
        return verify_numeric(prompt="", completion=text, answer=prompt.answer).reward or 0.0

    def sample(
        self, engine: TorchEngine, prompts: Sequence[Prompt], size: int, seed: int
    ) -> list[list[Completion]]:
        """Return `size` completions of each prompt."""
        sampling = Sampling(self.recipe.generation.max_new_tokens, stop_token_ids=self.stop)
        found: dict[str, list[Completion]] = {}
        for index, prompt in enumerate(prompts):
            seeds = tuple(seed + index * size + member for member in range(size))
            engine.add(GroupRequest(f"{index}", prompt.tokens, seeds, sampling))
        while engine.has_work():
            found.update(engine.step())
        return [found[f"{index}"] for index in range(len(prompts))]


def prepare(cwd: Path, model: Path | None, chosen: argparse.Namespace) -> Job:
    """Take the policy and the prompts of the default job."""
    model = model or make_model(cwd)
    nothing = ["--sft.num-steps", "0", "--num-steps", "0"]
    held_out = ["--prompts.num-held-out", "1024"]
    train(cwd, "prompts", ["--model", f"{model.resolve()}", *nothing, *held_out])
    run = cwd / "runs" / "prompts"
    overrides = {
        "controller": {"batch_size": chosen.batch_size, "group_size": 16},
        "algorithm": {"num_minibatches": chosen.minibatches},
        "trainer": {"learning_rate": chosen.learning_rate},
    }
    recipe = load_recipe(run / "config.toml", overrides)
    tokenizer = Tokenizer.from_file(f"{model / 'tokenizer.json'}")

    def read(name: str) -> list[Prompt]:
        rows = map(json.loads, (run / "prompts" / f"{name}.jsonl").read_text().splitlines())
        rendered = ((recipe.prompts.template.replace("{question}", r["question"]), r) for r in rows)
        return [Prompt(np.array(tokenizer.encode(text).ids), r["answer"]) for text, r in rendered]

    stop = () if chosen.endless else stop_token_ids(model)
    return Job(model, recipe, read("train"), read("held_out"), tokenizer, stop)


def learn(
    job: Job, objective: str, eta: float, seed: int, num_steps: int, every: int
) -> dict[str, Any]:
    """Train; return the held-out pass rate by step, and what the last step's metrics say."""
    shared = job.recipe.algorithm.model_dump(include={"advantage", "num_minibatches"})
    algorithm = ALGORITHMS[OBJECTIVES[objective]](**shared)
    recipe = job.recipe.model_copy(update={"algorithm": algorithm, "seed": seed})
    settings = StepSettings(recipe.algorithm, recipe.generation.temperature, seed)
    backend = make_backend(load_policy(job.model), recipe.trainer)
    engine = TorchEngine(load_policy(job.model), recipe.generation, version=0)
    versions = [weights_of(backend)]
    pass_rates: dict[int, float] = {}
    clipped: list[float] = []
    groups = recipe.groups_per_step
    for step in range(1, num_steps + 1):
        sampled_by = max(0, step - 1 - eta)
        engine.load_weights(versions[int(sampled_by)], version=int(sampled_by))
        chosen = np.random.default_rng([seed, step]).choice(len(job.train), groups, replace=False)
        prompts = [job.train[index] for index in chosen]
        first_seed = (seed * 10**4 + step) * 10**4
        size = recipe.controller.group_size
        answers = job.sample(engine, prompts, size, first_seed)
        sequences = sequences_of(job, prompts, answers)
        numbers = train_step(backend, sequences, step=step, settings=settings)
        clipped.append(numbers.metrics["clip_fraction"].value)
        versions.append(weights_of(backend))
        if step % every == 0 or step == num_steps:
            engine.load_weights(versions[-1], version=step)
            pass_rates[step] = pass_rate(job, engine)
    return {"pass_rates": pass_rates, "clip_fraction": fmean(clipped)}


def sequences_of(
    job: Job, prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]
) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            prompt.tokens,
            completion.tokens,
            completion.logprobs,
            np.ones(len(completion.tokens), bool),
            job.reward(prompt, completion),
            group,
            completion.version_spans,
        )
        for group, (prompt, members) in enumerate(zip(prompts, answers, strict=True))
        for completion in members
    ]


def pass_rate(job: Job, engine: TorchEngine) -> float:
    answers = job.sample(engine, job.held_out, 1, seed=10**9)
    return fmean(job.reward(p, c) for p, (c,) in zip(job.held_out, answers, strict=True))


def weights_of(backend: TrainerBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export_weights().items()}


def speed(job: Job, cwd: Path, eta: float, num_steps: int) -> float:
    """Return the trained tokens/s of `areal-flow train`, without its first steps."""
    name = f"eta-{eta:g}"
    options = {
        "model": job.model.resolve(),
        "sft.num-steps": 0,
        "num-steps": num_steps,
        "controller.max-staleness": num_steps if eta == inf else f"{eta:g}",
    }
    train(cwd, name, [part for key, value in options.items() for part in (f"--{key}", f"{value}")])
    rows = areal_flow.open_run(cwd / "runs" / name).steps("arrow").to_pylist()[num_steps // 3 :]
    return float(sum(r["num_trained_tokens"] for r in rows) / sum(r["seconds_step"] for r in rows))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95% interval."""
    half = STUDENT_T[len(values)] * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values), half


def print_table(report: Mapping[str, Any], title: str) -> None:
    table = Table(title=title)
    shown = [first_and_last(run) for of_eta in report["etas"].values() for run in runs_of(of_eta)]
    steps = shown[0] if shown else ()
    for label in ("eta", *(f"step {step}, {name}" for step in steps for name in OBJECTIVES)):
        table.add_column(label, justify="right")
    table.add_column("clipped, both", justify="right")
    table.add_column("tokens/s", justify="right")
    for eta, of_eta in report["etas"].items():
        runs = {name: [*of_eta[name].values()] for name in OBJECTIVES}
        rates = [
            interval([run["pass_rates"][step] for run in runs[name]])
            for step in steps
            for name in OBJECTIVES
        ]
        clipped = [fmean(run["clip_fraction"] for run in runs[name]) for name in OBJECTIVES]
        table.add_row(
            eta,
            *(f"{mean:.3f} ± {half:.3f}" for mean, half in rates),
            " ".join(f"{share:.1%}" for share in clipped),
            f"{of_eta.get('tokens_per_second', 0):,.0f}",
        )
    Console(width=130).print(table)


def runs_of(of_eta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for name in OBJECTIVES for run in of_eta[name].values()]


def first_and_last(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the first and the last step after which the held-out prompts were answered."""
    steps = sorted(run["pass_rates"], key=int)
    return tuple(dict.fromkeys((steps[0], steps[-1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--etas", nargs="+", type=float, default=[0, 1, 2, 4, 8, 16, inf])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--endless", action="store_true", help="no token ends a completion")
    parser.add_argument("--flow-steps", type=int, default=0, help="of `train`; 0: no tokens/s")
    parser.add_argument("--model", type=Path, help="start from this directory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = ("steps", "batch_size", "minibatches", "learning_rate", "endless")
    settings = {name: getattr(chosen, name) for name in names}
    report: dict[str, Any] = {"settings": settings, "etas": {}}
    if chosen.json and chosen.json.is_file():
        report = json.loads(chosen.json.read_text())
        if report["settings"] != settings:
            parser.error(f"{chosen.json} is of {report['settings']}, this is {settings}")
    with tempfile.TemporaryDirectory(prefix="areal-flow-staleness-") as scratch:
        job = prepare(Path(scratch), chosen.model, chosen)
        for seed, eta, objective in product(chosen.seeds, chosen.etas, OBJECTIVES):
            of_eta = report["etas"].setdefault(f"{eta:g}", {name: {} for name in OBJECTIVES})
            if f"{seed}" not in of_eta[objective]:
                found = learn(job, objective, eta, seed, chosen.steps, chosen.every)
                of_eta[objective][f"{seed}"] = found
                keep(report, chosen.json)
        for eta in chosen.etas if chosen.flow_steps else ():
            of_eta = report["etas"][f"{eta:g}"]
            if "tokens_per_second" not in of_eta:
                of_eta["tokens_per_second"] = speed(job, Path(scratch), eta, chosen.flow_steps)
                keep(report, chosen.json)
    print_table(report, f"Held-out pass rate: {settings}")
    if chosen.plot:
        draw_staleness(report, chosen.plot)


def keep(report: Mapping[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
