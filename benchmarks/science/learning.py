"""Trains the default policy on data of a given age; used by four experiments.

Every batch is sampled by the policy of exactly eta versions before (of version 0 until there are so
many), by `controller.exact_staleness`: the worst that `controller.max_staleness = eta` allows. The
policy is the default job's after fine-tuning. The pass rate is of a seed's 1,024 held-out prompts,
one sample each, after the last step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_flow.core.layout import RunLayout
from areal_flow.log.queries import Run
from benchmarks import harness
from benchmarks.schedule import make_warm_model

OPTIONS = {"seeds": [0, 1, 2], "samples": 2560, "learning_rate": 2e-5, "model": Path, "keep": Path}
"""`samples`: trajectories that each run trains, whatever its batch. `model`: the fine-tuned policy,
which is made first if it is not given. `keep`: a directory where the runs are kept; with the same
options, an experiment that was stopped repeats none that finished there."""
QUICK = {"seeds": [0, 1], "samples": 256}
Result = TypeVar("Result")
BATCH_SIZE, GROUP_SIZE, MINIBATCH_SIZE, WARM_UP, NUM_HELD_OUT = 128, 16, 32, 640, 1024
"""In trajectories."""


@dataclass(frozen=True)
class Setting:
    """The settings in which a run differs from the others."""

    algorithm: Mapping[str, Any]
    """Its name, and settings of its own."""
    eta: float
    batch_size: int = BATCH_SIZE
    learning_rate: float | None = None
    """By default the experiment's."""


def pass_rates(settings: Mapping[str, Setting], chosen: Any) -> dict[str, list[float]]:
    """Train each setting with each seed; return the held-out pass rates by seed."""
    return results(learn, settings, chosen)


def results(
    measure: Callable[..., Result], settings: Mapping[str, Setting], chosen: Any
) -> dict[str, list[Result]]:
    """Call `measure` as `learn` for each setting and seed; return what it returns, by seed."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-science-") as scratch:
        cwd = Path(chosen.keep or scratch).resolve()
        cwd.mkdir(parents=True, exist_ok=True)
        chosen.model = (chosen.model or make_warm_model(cwd)).resolve()
        calls = [
            (cwd, f"{number}-{seed}", setting, seed, chosen)
            for number, setting in enumerate(settings.values())
            for seed in chosen.seeds
        ]
        environment = {"OMP_NUM_THREADS": "1"}
        processes = chosen.processes
        made = iter(harness.in_processes(measure, calls, environment, num_processes=processes))
    return {name: [next(made) for _ in chosen.seeds] for name in settings}


def learn(cwd: Path, name: str, setting: Setting, seed: int, chosen: Any) -> float:
    """Train on `samples` trajectories; return the held-out pass rate."""
    summary = train(cwd, name, setting, seed, chosen).summary()
    return float(summary["held_out_after"]["pass_rate"])


def train(cwd: Path, name: str, setting: Setting, seed: int, chosen: Any) -> Run:
    num_steps = chosen.samples // setting.batch_size
    staleness = int(min(setting.eta, num_steps - 1))
    settings = {
        "seed": seed,
        "model": chosen.model,
        "num-steps": num_steps,
        "prompts.num-held-out": NUM_HELD_OUT,
        "controller.batch-size": setting.batch_size,
        "controller.group-size": GROUP_SIZE,
        "controller.exact-staleness": staleness,
        "controller.max-staleness": staleness,
        "algorithm.num-minibatches": setting.batch_size // MINIBATCH_SIZE,
        "trainer.learning-rate": setting.learning_rate or chosen.learning_rate,
        "trainer.num-warmup-steps": WARM_UP // setting.batch_size,
    }
    if RunLayout(cwd / "runs" / name).summary.is_file():
        return Run(cwd / "runs" / name)
    own = {f"algorithm.{key}": value for key, value in setting.algorithm.items()}
    return harness.train(cwd, name, {**settings, **own})
