"""TRL's `GRPOTrainer` beside this project: same policy, prompts, reward, lengths and updates.

On the CPU with two cores, taking turns. TRL generates and trains with two threads; sync has two
generators, and then a trainer of two threads; async has one generator and one trainer.

    short   the default job: a warm-started policy of 0.6M, 32 prompts x 16 completions of at most
            16 tokens, two updates a step
    long    random weights, 11M parameters, 4 prompts x 8 completions of 128 to 512 tokens, one
            update a step; the reward is the share of digits

A step of TRL lasts from the end of the update before it to the end of its last update. The first
steps are left out. Both see the same tokens if the mean rewards of step 1 agree.

    python -m benchmarks.trl --trl PYTHON [--profiles short long] [--rounds 1] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from areal_flow.cluster.placement import PROCESS_ENVIRONMENT
from areal_flow.policy.models.policy import empty_policy
from benchmarks import harness
from benchmarks.schedule import make_warm_model
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

LONG = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 5}
NUMERIC = "areal_flow.rewards.math.reward:verify_numeric"
DIGITS = "benchmarks.trl_reward:share_of_digits"


class Profile(NamedTuple):
    """The common task; `settings` are those of `areal-flow train`, also read by `trl_side`."""

    make_model: Callable[[Path], Path]
    reward: str
    num_steps: int
    num_skipped: int
    settings: Mapping[str, Any]


def make_random_model(cwd: Path) -> Path:
    """Write 11M random parameters; a token ends a completion with probability 1/400."""
    directory = cwd / "model-11M"
    write_tiny_model(directory, max_model_len=640)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LONG))
    torch.manual_seed(0)
    empty_policy(directory).save_pretrained(directory)
    return directory


SHORT_SETTINGS = {
    "controller.batch-size": 512,
    "controller.group-size": 16,
    "algorithm.num-minibatches": 2,
    "generation.max-new-tokens": 16,
    "trainer.learning-rate": 4e-5,
    "trainer.num-warmup-steps": 0,
}
LONG_SETTINGS = {
    "controller.batch-size": 32,
    "controller.group-size": 8,
    "algorithm.num-minibatches": 1,
    "generation.max-new-tokens": 512,
    "trainer.learning-rate": 1e-5,
    "trainer.num-warmup-steps": 0,
    "sft.num-steps": 0,
    "generation.max-model-len": 640,
    "generation.max-num-seqs": 32,
    "trainer.tokens-per-micro-batch": 4096,
    "rewards": f'[{{verifier = "{DIGITS}"}}]',
}
PROFILES = {
    "short": Profile(make_warm_model, NUMERIC, 12, 4, SHORT_SETTINGS),
    "long": Profile(make_random_model, DIGITS, 5, 2, LONG_SETTINGS),
}


def by_schedule(cwd: Path, model: Path, profile: Profile, schedule: str) -> dict[str, float]:
    """Train with this project."""
    num_cores = 2 if schedule == "sync" else 1
    cores = {"cluster.num-generators": num_cores, "cluster.num-trainer-threads": num_cores}
    own = {"schedule": schedule, "model": model, "num-steps": profile.num_steps, **cores}
    run = harness.train(cwd, f"run-{len(list(cwd.glob('runs/*')))}", {**own, **profile.settings})
    rows = harness.steps_after(run, 0)
    measured = rows[profile.num_skipped :]
    seconds = sum(row["step_s"] for row in measured)
    return {
        "step_s": seconds / len(measured),
        "trained_tokens_per_s": sum(row["num_trained_tokens"] for row in measured) / seconds,
        "completion_tokens": mean(row["completion_tokens_mean"] for row in measured),
        "reward_of_step_1": rows[0]["reward_mean"],
    }


def by_trl(
    python: str, cwd: Path, model: Path, profile: Profile, prompts: Sequence[Any]
) -> dict[str, float]:
    """Train with TRL, in a process of its own."""
    given = {"model": str(model), "prompts": prompts, "output": str(cwd / "trl"), "threads": 2}
    given |= {
        "num_steps": profile.num_steps,
        "reward": profile.reward,
        "settings": profile.settings,
    }
    environment = {**PROCESS_ENVIRONMENT, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [python, "-m", "benchmarks.trl_side"]
    output = harness.output_of(command, stdin=json.dumps(given), added=environment)
    batches, ends = json.loads(output.splitlines()[-1])
    num_updates = profile.settings["algorithm.num-minibatches"]
    ends = ends[num_updates - 1 :: num_updates]
    measured = batches[profile.num_skipped :]
    seconds = ends[-1] - ends[profile.num_skipped - 1]
    num_tokens = sum(batch["num_tokens"] for batch in measured)
    return {
        "step_s": seconds / len(measured),
        "trained_tokens_per_s": num_tokens / seconds,
        "completion_tokens": num_tokens / len(measured) / profile.settings["controller.batch-size"],
        "reward_of_step_1": batches[0]["reward_mean"],
    }


def compare(
    name: str, cwd: Path, python: str, prompts: Sequence[Any], num_rounds: int
) -> list[dict[str, Any]]:
    """Return means over the rounds of each way."""
    profile = PROFILES[name]
    model = profile.make_model(cwd).resolve()
    ways = {
        "TRL": partial(by_trl, python, cwd, model, profile, prompts),
        "sync": partial(by_schedule, cwd, model, profile, "sync"),
        "async": partial(by_schedule, cwd, model, profile, "async"),
    }
    rows: list[dict[str, Any]] = []
    for way, turns in harness.take_turns(num_rounds, ways).items():
        means = {column: mean(turn[column] for turn in turns) for column in turns[0]}
        rows.append({"profile": name, "way": way, **means})
    base = rows[0]["trained_tokens_per_s"]
    return [{**row, "over_trl": row["trained_tokens_per_s"] / base} for row in rows]


def main() -> None:
    names = list(PROFILES)
    choices = {"profiles": names}
    chosen = harness.parse_options(__doc__, choices=choices, trl=str, profiles=names, rounds=1)
    if not chosen.trl:
        sys.exit("--trl: expected an interpreter that has TRL, such as `nox -s trl` makes")
    rows = []
    with tempfile.TemporaryDirectory(prefix="areal-flow-trl-") as scratch:
        run = harness.train(Path(scratch), "prompts", {"num-steps": 0, "sft.num-steps": 0})
        questions = harness.questions(run, "train")
        prompts = [{"prompt": prompt, "answer": answer} for prompt, answer in questions]
        for name in chosen.profiles:
            rows += compare(name, Path(scratch), chosen.trl, prompts, chosen.rounds)
    harness.report(chosen.json, {"Beside TRL": rows})


if __name__ == "__main__":
    main()
