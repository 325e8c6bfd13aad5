"""CPU seconds per step by role, for completions, groups and batches of a given size.

A short run of `areal-flow train` with the default job's prompts and a small policy that never stops
by itself, so that every completion has the same length. The time that each process has used is read
four times a second, and interpolated at the times at which the ledger's rows were committed. The
first steps are left out. Overhead is what driver and reward worker use.

    python -m benchmarks.overhead [--tokens 8] [--group-size 16] [--batch-size 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import sleep, time

import numpy as np
import psutil

import areal_flow
from benchmarks import harness
from benchmarks.endless_policy import write_endless_policy

PROMPT_ROOM = 32
ROLES = ("driver", "reward", "generator", "trainer")


def measure(cwd: Path, chosen: argparse.Namespace) -> dict[str, float]:
    """Return means over the measured steps of a run, in seconds."""
    samples: list[dict[str, float]] = []
    log = cwd / "train.log"
    with log.open("w") as output:
        command = [*harness.CLI, "train", "--name", "run", *harness.flags(settings_of(cwd, chosen))]
        driver = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)
        while driver.poll() is None:
            samples.append({"at": time(), **processor_s(driver.pid)})
            sleep(0.25)
    if driver.returncode:
        sys.exit(f"the run failed:\n{log.read_text()}")
    steps = areal_flow.open_run(cwd / "runs" / "run").steps("arrow").to_pylist()
    at = {row["step"]: row["committed_at"].timestamp() for row in steps}
    moments, num_measured = [at[chosen.skip], at[chosen.steps]], chosen.steps - chosen.skip
    used = {role: used_between(moments, samples, role) / num_measured for role in ROLES}
    step_s, overhead_s = (moments[1] - moments[0]) / num_measured, used["driver"] + used["reward"]
    return {"step_s": step_s, **used, "overhead_s": overhead_s}


def settings_of(cwd: Path, chosen: argparse.Namespace) -> dict[str, object]:
    """Write the policy; return the settings that differ from the default recipe."""
    batch_size, max_model_len = chosen.batch_size, chosen.tokens + PROMPT_ROOM
    write_endless_policy(cwd / "model", max_model_len=max_model_len)
    return {
        "model": cwd / "model",
        "num-steps": chosen.steps,
        "sft.num-steps": 0,
        "prompts.num-held-out": 0,
        "generation.max-new-tokens": chosen.tokens,
        "generation.max-model-len": max_model_len,
        "generation.max-num-seqs": min(128, batch_size),
        "controller.group-size": chosen.group_size,
        "controller.batch-size": batch_size,
        "algorithm.num-minibatches": min(2, batch_size // chosen.group_size),
        "trainer.tokens-per-micro-batch": max(8192, max_model_len),
        "trainer.learning-rate": 1e-6,
    }


def processor_s(driver: int) -> dict[str, float]:
    """Return each role's CPU seconds so far; nothing if a process has just ended."""
    used = dict.fromkeys((*ROLES, "other"), 0.0)
    try:
        process = psutil.Process(driver)
        members = [
            ("driver", process),
            *((role_of(p), p) for p in process.children(recursive=True)),
        ]
        for role, member in members:
            times = member.cpu_times()
            used[role] += times.user + times.system
    except psutil.Error:
        return {}
    return used


def role_of(process: psutil.Process) -> str:
    """Return the role of a worker, the first part of its name."""
    return next((role for role in ROLES if process.name().startswith(role)), "other")


def used_between(moments: list[float], samples: list[dict[str, float]], role: str) -> float:
    """Return a role's CPU seconds between two moments, including those of ended processes."""
    read = [sample for sample in samples if role in sample]
    used = np.maximum.accumulate([sample[role] for sample in read])
    began, ended = np.interp(moments, [sample["at"] for sample in read], used)
    return float(ended - began)


def main() -> None:
    sizes = {"tokens": 8, "group_size": 16, "batch_size": 512}
    chosen = harness.parse_options(__doc__, **sizes, steps=12, skip=4)
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        row = measure(Path(scratch), chosen)
    shape = ", ".join(f"{name} {getattr(chosen, name)}" for name in sizes)
    harness.report(chosen.json, {f"Processor seconds of a step: {shape}": [row]})


if __name__ == "__main__":
    main()
