"""Staleness: decoupled against plain PPO on old data.

The paper's Table 2 at the scale of a laptop. All runs train equally many samples. Each batch is
sampled by the policy of exactly eta versions before, the worst that `controller.max_staleness`
allows; at `inf` by version 0 throughout. The result is the held-out pass rate at the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.plots import draw_estimates
from benchmarks.science import learning
from benchmarks.science.findings import Estimate, Finding, conclude, difference

OBJECTIVES = {"decoupled": {"name": "decoupled_ppo"}, "plain PPO": {"name": "ppo"}}
OPTIONS = {"etas": [0.0, 2.0, 8.0, float("inf")], **learning.OPTIONS}
QUICK = {"etas": [0.0, 1.0], **learning.QUICK}


def run(chosen: Any) -> Finding:
    settings = {
        f"{objective}, {eta:g}": learning.Setting(algorithm, eta)
        for objective, algorithm in OBJECTIVES.items()
        for eta in chosen.etas
    }
    pass_rates = learning.pass_rates(settings, chosen)
    lines = {
        objective: {
            f"{eta:g}": Estimate.of(pass_rates[f"{objective}, {eta:g}"]) for eta in chosen.etas
        }
        for objective in OBJECTIVES
    }
    rows = [
        {"eta": f"{eta:g}", **{name: line[f"{eta:g}"].text() for name, line in lines.items()}}
        for eta in chosen.etas
    ]
    first = chosen.etas[0]
    conclusions = [
        conclude(
            f"{objective}, pass rate at eta {eta:g} less that at eta {first:g}",
            difference(pass_rates[f"{objective}, {first:g}"], pass_rates[f"{objective}, {eta:g}"]),
        )
        for objective in OBJECTIVES
        for eta in chosen.etas[-2:]
    ] + [
        conclude(
            f"plain PPO less decoupled at eta {eta:g}",
            difference(pass_rates[f"decoupled, {eta:g}"], pass_rates[f"plain PPO, {eta:g}"]),
        )
        for eta in chosen.etas[1:]
    ]
    draw = partial(
        draw_estimates,
        {name: {at: (e.mean, e.half) for at, e in line.items()} for name, line in lines.items()},
        x="eta, versions between sampling and training",
        y="held-out pass rate",
    )
    return Finding(
        {f"Held-out pass rate after {chosen.samples:,} samples": rows}, conclusions, draw
    )
