"""Trains a policy on data of a given age; used by five experiments.

Every batch is sampled by the policy of exactly eta versions before (of version 0 until there are so
many), by `controller.exact_staleness`: the worst that `controller.max_staleness = eta` allows. The
policy is the default job's after fine-tuning, or another recipe's `model`, whose batches are the
recipe's own. The pass rate is of a seed's held-out prompts (1,024 of the default job), one sample
each, after the last step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_flow.config import load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.log.queries import Run
from benchmarks import harness
from benchmarks.schedule import make_warm_model
from pipelines.jobs.job import RECIPES

OPTIONS = {
    "recipe": harness.RECIPE,
    "seeds": [0, 1, 2],
    "samples": 2560,
    "learning_rate": 2e-5,
    "model": Path,
    "dtype": "",
    "keep": Path,
}
"""`samples`: trajectories that each run trains, whatever its batch. `model`: the first policy; the
default recipe's is made, by fine-tuning, if it is not given. `dtype`: of generators and trainer, if
it is not the recipe's; float32 is the faster one on a CPU without bfloat16 products. `keep`: a
directory where the runs are kept; with the same options, an experiment that was stopped repeats
none that finished there."""
QUICK = {"seeds": [0, 1], "samples": 256}
Result = TypeVar("Result")
BATCH_SIZE, GROUP_SIZE, MINIBATCH_SIZE, WARM_UP, NUM_HELD_OUT = 128, 16, 32, 640, 1024
"""Of the default recipe, in trajectories."""


@dataclass(frozen=True)
class Setting:
    """The settings in which a run differs from the others."""

    algorithm: Mapping[str, Any]
    """Its name, and settings of its own."""
    eta: float
    batch_size: int = BATCH_SIZE
    """Of the default recipe."""
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
        if chosen.recipe != harness.RECIPE:
            _require_one_size(settings, chosen)
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


def _require_one_size(settings: Mapping[str, Setting], chosen: Any) -> None:
    if chosen.model is None:
        raise SystemExit(f"--recipe {chosen.recipe} needs --model DIRECTORY")
    if any(setting.batch_size != BATCH_SIZE for setting in settings.values()):
        raise SystemExit(f"--recipe {chosen.recipe}: this experiment changes the default's batches")


def learn(cwd: Path, name: str, setting: Setting, seed: int, chosen: Any) -> float:
    """Train on `samples` trajectories; return the held-out pass rate."""
    summary = train(cwd, name, setting, seed, chosen).summary()
    return float(summary["held_out_after"]["pass_rate"])


def train(cwd: Path, name: str, setting: Setting, seed: int, chosen: Any) -> Run:
    sizes = _sizes(chosen.recipe, setting.batch_size)
    num_steps = chosen.samples // sizes["controller.batch-size"]
    staleness = int(min(setting.eta, num_steps - 1))
    settings = {
        "seed": seed,
        "model": chosen.model,
        "num-steps": num_steps,
        "controller.exact-staleness": staleness,
        "controller.max-staleness": staleness,
        "trainer.learning-rate": setting.learning_rate or chosen.learning_rate,
    }
    if RunLayout(cwd / "runs" / name).summary.is_file():
        return Run(cwd / "runs" / name)
    own = {f"algorithm.{key}": value for key, value in setting.algorithm.items()}
    if chosen.dtype:
        own |= {"generation.dtype": chosen.dtype, "trainer.dtype": chosen.dtype}
    return harness.train(cwd, name, {**settings, **sizes, **own}, recipe=chosen.recipe)


def _sizes(recipe: str, batch_size: int) -> dict[str, int]:
    if recipe != harness.RECIPE:
        own = load_recipe(RECIPES / f"{recipe}.toml")
        return {
            "prompts.num-held-out": own.prompts.num_held_out,
            "controller.batch-size": own.controller.batch_size,
            "evaluation.every-steps": 0,
        }
    return {
        "prompts.num-held-out": NUM_HELD_OUT,
        "controller.batch-size": batch_size,
        "controller.group-size": GROUP_SIZE,
        "algorithm.num-minibatches": batch_size // MINIBATCH_SIZE,
        "trainer.num-warmup-steps": WARM_UP // batch_size,
    }
