"""Looking up: a policy learns to find in its sandbox what it cannot know.

The recipe `lookup`: the number that is asked for is in a file of the episode's sandbox, in every
second episode behind a reference to another line. After fine-tuning the policy can look, but
usually guesses. Without tools (`workflow.max_calls = 0`) nothing can be learned. Rewards of steps
are those of training, with exploration; pass rates are of held-out questions.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from areal_flow.core.layout import RunLayout
from areal_flow.log.queries import Run
from benchmarks import harness
from benchmarks.plots import draw_estimates
from benchmarks.science.findings import Estimate, Finding, conclude, difference

TOOLS, NONE = "with tools", "without"
SETTINGS = {TOOLS: {}, NONE: {"workflow.max-calls": 0}}
OPTIONS = {"seeds": [0, 1, 2], "steps": 20, "sft_steps": 800, "held_out": 256, "keep": Path}
QUICK = {"seeds": [0, 1], "steps": 2, "sft_steps": 20, "held_out": 16}


def run(chosen: Any) -> Finding:
    with tempfile.TemporaryDirectory(prefix="areal-flow-science-") as scratch:
        cwd = Path(chosen.keep or scratch).resolve()
        cwd.mkdir(parents=True, exist_ok=True)
        runs = {
            name: [_trained(cwd, f"{name}-{seed}", settings, seed, chosen) for seed in chosen.seeds]
            for name, settings in SETTINGS.items()
        }
        summaries = {name: [each.summary() for each in made] for name, made in runs.items()}
        curves = {name: _curve(made) for name, made in runs.items()}
    rates = {
        name: {
            when: [float(each[f"held_out_{when}"]["pass_rate"]) for each in made]
            for when in ("before", "after")
        }
        for name, made in summaries.items()
    }
    minutes = {
        name: [(each["first_policy_s"] + each["training_s"]) / 60 for each in made]
        for name, made in summaries.items()
    }
    rows = [
        {
            "policy": name,
            **{f"pass rate {when}": Estimate.of(rates[name][when]).text() for when in rates[name]},
            "minutes": Estimate.of(minutes[name]).text(1),
        }
        for name in SETTINGS
    ]
    conclusions = [
        conclude("with tools, after less before", difference(*rates[TOOLS].values())),
        conclude(
            "after, with tools less without",
            difference(rates[NONE]["after"], rates[TOOLS]["after"]),
        ),
    ]
    draw = partial(draw_estimates, curves, x="step", y="reward of training")
    return Finding({"Held-out questions": rows}, conclusions, draw)


def _trained(cwd: Path, name: str, settings: dict[str, Any], seed: int, chosen: Any) -> Run:
    name = name.replace(" ", "-")
    if RunLayout(cwd / "runs" / name).summary.is_file():
        return Run(cwd / "runs" / name)
    given = {
        "seed": seed,
        "num-steps": chosen.steps,
        "sft.num-steps": chosen.sft_steps,
        "prompts.num-held-out": chosen.held_out,
        **settings,
    }
    return harness.train(cwd, name, given, recipe="lookup")


def _curve(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Return the reward of each step, with its interval over seeds."""
    rewards = [run.steps()["reward_mean"].dropna().tolist() for run in runs]
    estimates = map(Estimate.of, zip(*rewards, strict=True))
    return {str(step): (each.mean, each.half) for step, each in enumerate(estimates, 1)}
