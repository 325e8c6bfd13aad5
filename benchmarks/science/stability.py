"""Stability: does a policy that has learned from old data stay where it is?

Every batch is sampled by the policy of exactly eta versions before, and training goes on long after
the task is solved. If tails of the importance weights make a policy worse again, capping them (TIS)
helps; if steps are too large for how late their effect is seen, smaller ones help. `late reward` is
the mean of the last half of the steps, `lowest` its worst ten steps in a row. `effective samples`
are what importance weights leave of a batch, (sum w)^2 / (N sum w^2), in the worst ten steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.plots import draw_bars
from benchmarks.science import learning
from benchmarks.science.findings import Estimate, Finding, conclude, difference

DECOUPLED: dict[str, Any] = {"name": "decoupled_ppo"}
TIS = {**DECOUPLED, "importance_weight_rule": "truncate", "importance_weight_cap": 2.0}
SLOWER = 4
WINDOW = 10
OPTIONS = {"eta": 8.0, **learning.OPTIONS, "samples": 12_800, "others": ["tis", "slower", "plain"]}
"""`others`: what decoupled PPO is compared with."""
QUICK = {**learning.QUICK, "samples": 2560}


class Outcome(NamedTuple):
    pass_rate: float
    late_reward: float
    lowest: float
    effective_samples: float


def run(chosen: Any) -> Finding:
    rate, eta = chosen.learning_rate, chosen.eta
    base, plain = f"decoupled PPO, {rate:g}", f"plain PPO, {rate:g}"
    slower = f"decoupled PPO, {rate / SLOWER:g}"
    others = {
        "tis": ("the same, TIS with cap 2", learning.Setting(TIS, eta)),
        "slower": (slower, learning.Setting(DECOUPLED, eta, learning_rate=rate / SLOWER)),
        "plain": (plain, learning.Setting({"name": "ppo"}, eta)),
    }
    compared = dict(others[name] for name in chosen.others)
    settings = {base: learning.Setting(DECOUPLED, eta), **compared}
    outcomes = learning.results(outcome_of, settings, chosen)

    def values(name: str, field: str) -> list[float]:
        return [getattr(outcome, field) for outcome in outcomes[name]]

    rows = [
        {"objective, learning rate": name}
        | {
            field.replace("_", " "): Estimate.of(values(name, field)).text()
            for field in Outcome._fields
        }
        for name in settings
    ]
    late = {name: values(name, "late_reward") for name in settings}
    gains = {name: difference(late[base], late[name]) for name in compared}
    conclusions = [
        conclude(f"{name}, late reward less that of {base}", gain) for name, gain in gains.items()
    ]
    draw = partial(
        draw_bars,
        {name: (gain.mean, gain.half) for name, gain in gains.items()},
        x=f"late reward, less that of {base}",
        none=0.0,
    )
    title = f"{chosen.samples:,} samples at eta {chosen.eta:g}"
    return Finding({title: rows}, conclusions, draw)


def outcome_of(cwd: Path, name: str, setting: learning.Setting, seed: int, chosen: Any) -> Outcome:
    finished = learning.train(cwd, name, setting, seed, chosen)
    steps = finished.steps("arrow", where="step > 0")
    rewards = steps["reward_mean"].to_pylist()
    late = rewards[len(rewards) // 2 :]
    samples = [1.0]
    if "importance_weight_ess_fraction" in steps.column_names:  # plain PPO has no weights
        samples = steps["importance_weight_ess_fraction"].to_pylist()
    return Outcome(
        float(finished.summary()["held_out_after"]["pass_rate"]),
        fmean(late),
        min(window_means(late)),
        min(window_means(samples)),
    )


def window_means(values: list[float]) -> list[float]:
    """Return the means of `WINDOW` values in a row, or of all if they are fewer."""
    size = min(WINDOW, len(values))
    return [fmean(values[at : at + size]) for at in range(len(values) - size + 1)]
