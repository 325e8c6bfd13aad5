"""TRL's `GRPOTrainer` beside this project: same policy, prompts, reward, lengths and updates.

All on the CPU with two cores, taking turns. TRL generates and trains with two threads; sync has two
generators, and then a trainer of two threads; async has one generator and one trainer.

    short   the default job: a warm-started policy of 0.6M, 32 prompts x 16 completions of at most
            16 tokens, two updates a step
    long    random weights, 11M parameters, 4 prompts x 8 completions of 128 to 512 tokens, one
            update a step; the reward is the share of digits

A step of TRL lasts from the end of the update before it to the end of its last update. The first
steps are left out (`--skip`). Both see the same tokens if the mean rewards of step 1 agree.

    python -m benchmarks.trl --trl PYTHON [--profiles short long] [--rounds 1] [--json FILE]

PYTHON is an interpreter that has TRL, such as `nox -s trl` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import areal_flow
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT
from areal_flow.config import load_recipe
from areal_flow.models.policy import empty_policy
from benchmarks.schedule import make_model as make_warm_model
from benchmarks.schedule_comparison import train
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

ROOT = Path(__file__).parents[1]
LONG = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 5}


@dataclass(frozen=True)
class Profile:
    """What all of them train; `options` are of `areal-flow train`."""

    make_model: Callable[[Path], Path]
    batch_size: int
    group_size: int
    num_minibatches: int
    max_new_tokens: int
    learning_rate: float
    reward: str
    num_steps: int
    num_skipped: int
    options: Mapping[str, Any]


def make_random_model(cwd: Path) -> Path:
    """Write 11M parameters of the tiny policy's kind, whose completions end one time in 400."""
    directory = cwd / "model-11M"
    write_tiny_model(directory, max_model_len=640)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LONG))
    torch.manual_seed(0)
    empty_policy(directory).save_pretrained(directory)
    return directory


PROFILES = {
    "short": Profile(
        make_warm_model,
        batch_size=512,
        group_size=16,
        num_minibatches=2,
        max_new_tokens=16,
        learning_rate=4e-5,
        reward="areal_flow.rewards.numeric:verify_numeric",
        num_steps=12,
        num_skipped=4,
        options={"trainer.num-learning-rate-warmup-steps": 0},
    ),
    "long": Profile(
        make_random_model,
        batch_size=32,
        group_size=8,
        num_minibatches=1,
        max_new_tokens=512,
        learning_rate=1e-5,
        reward="benchmarks.trl_reward:share_of_digits",
        num_steps=5,
        num_skipped=2,
        options={
            "sft.num-steps": 0,
            "generation.max-model-len": 640,
            "generation.max-num-seqs": 32,
            "trainer.tokens-per-micro-batch": 4096,
            "trainer.num-learning-rate-warmup-steps": 0,
            "rewards": '[{verifier = "benchmarks.trl_reward:share_of_digits"}]',
        },
    ),
}


@dataclass(frozen=True)
class Speed:
    """Of the measured steps of one way."""

    seconds_step: float
    trained_tokens_per_second: float
    reward_of_step_1: float
    reward_of_last_step: float
    tokens_mean: float


def by_schedule(cwd: Path, model: Path, of: Profile, schedule: str, name: str) -> Speed:
    """Train with this project."""
    num_cores = "2" if schedule == "sync" else "1"
    options = {
        "schedule": schedule,
        "model": model,
        "num-steps": of.num_steps,
        "controller.batch-size": of.batch_size,
        "controller.group-size": of.group_size,
        "algorithm.num-minibatches": of.num_minibatches,
        "generation.max-new-tokens": of.max_new_tokens,
        "trainer.learning-rate": of.learning_rate,
        "cluster.num-generators": num_cores,
        "cluster.num-trainer-threads": num_cores,
        **of.options,
    }
    train(cwd, name, [part for key, value in options.items() for part in (f"--{key}", f"{value}")])
    rows = areal_flow.open_run(cwd / "runs" / name).steps("arrow").to_pylist()
    measured = [row for row in rows if row["step"] > of.num_skipped]
    seconds = sum(row["seconds_step"] for row in measured)
    return Speed(
        seconds / len(measured),
        sum(row["num_trained_tokens"] for row in measured) / seconds,
        rows[1]["reward_mean"],
        rows[-1]["reward_mean"],
        mean(row["completion_tokens_mean"] for row in measured),
    )


def by_trl(python: str, cwd: Path, model: Path, of: Profile, prompts: Sequence[Any]) -> Speed:
    """Train with TRL, in a process of its own."""
    given = {
        "model": str(model),
        "prompts": prompts,
        "reward": of.reward,
        "output": str(cwd / "trl"),
        "threads": 2,
        "seed": 0,
        **{name: getattr(of, name) for name in ("batch_size", "group_size", "num_minibatches")},
        **{name: getattr(of, name) for name in ("max_new_tokens", "learning_rate", "num_steps")},
    }
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [python, "-m", "benchmarks.trl_side"],
        input=json.dumps(given),
        env={**os.environ, **PROCESS_ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    batches, ends = (
        found["batches"],
        found["step_ends"][of.num_minibatches - 1 :: of.num_minibatches],
    )
    measured = batches[of.num_skipped :]
    seconds = ends[-1] - ends[of.num_skipped - 1]
    tokens = sum(batch["num_tokens"] for batch in measured)
    return Speed(
        seconds / len(measured),
        tokens / seconds,
        batches[0]["reward_mean"],
        batches[-1]["reward_mean"],
        tokens / len(measured) / of.batch_size,
    )


def default_prompts(cwd: Path) -> list[dict[str, str]]:
    """Return the default job's prompts, as its runs render them."""
    train(cwd, "prompts", ["--num-steps", "0", "--sft.num-steps", "0"])
    run = cwd / "runs" / "prompts"
    template = load_recipe(run / "config.toml").prompts.template
    rows = map(json.loads, (run / "prompts" / "train.jsonl").read_text().splitlines())
    return [
        {"prompt": template.replace("{question}", row["question"]), "answer": row["answer"]}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl", required=True, metavar="PYTHON")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=[*PROFILES])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of each profile's own")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="areal-flow-trl-") as scratch:
        cwd = Path(scratch)
        prompts = default_prompts(cwd)
        for name in arguments.profiles:
            of = PROFILES[name]
            if arguments.steps:
                of = replace(of, num_steps=arguments.steps)
            report[name] = compare(arguments, cwd, of, name, prompts)
    print_table(report)
    if arguments.json:
        arguments.json.write_text(json.dumps({"profiles": report}, indent=2) + "\n")


def compare(
    arguments: argparse.Namespace, cwd: Path, of: Profile, name: str, prompts: Sequence[Any]
) -> dict[str, Any]:
    """Have the three ways take turns."""
    model = of.make_model(cwd).resolve()
    found: dict[str, list[Speed]] = {"trl": [], "sync": [], "async": []}
    for round_ in range(arguments.rounds):
        found["trl"].append(by_trl(arguments.trl, cwd, model, of, prompts))
        for schedule in ("sync", "async"):
            run = f"{name}-{schedule}-{round_}"
            found[schedule].append(by_schedule(cwd, model, of, schedule, run))
    columns = Speed.__dataclass_fields__
    return {
        column: {way: mean(getattr(speed, column) for speed in found[way]) for way in found}
        for column in columns
    }


def print_table(report: Mapping[str, Any]) -> None:
    table = Table(title="Two cores")
    for label in ("profile", "way", "s/step", "trained tokens/s", "over TRL", "tokens"):
        table.add_column(label, justify="right")
    for label in ("reward, step 1", "reward, last"):
        table.add_column(label, justify="right")
    for profile, of in report.items():
        speeds = of["trained_tokens_per_second"]
        for way, speed in speeds.items():
            cells = (
                f"{of['seconds_step'][way]:.2f}",
                f"{speed:,.0f}",
                f"{speed / speeds['trl']:.2f}",
            )
            rewards = (of["reward_of_step_1"][way], of["reward_of_last_step"][way])
            table.add_row(
                profile,
                way,
                *cells,
                f"{of['tokens_mean'][way]:.0f}",
                *(f"{reward:.3f}" for reward in rewards),
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
