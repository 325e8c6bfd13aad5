"""Batch against eta: is it the versions that a sample is behind, or the samples?

A sample of eta versions before is eta times the batch behind, in samples. All runs train equally
many samples in updates of 32 trajectories, so that a larger batch has fewer versions and as many
updates. Algorithms are plain PPO, which staleness hurts, and decoupled PPO.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.plots import draw_estimates
from benchmarks.science import learning
from benchmarks.science.findings import Estimate, Finding, conclude, difference
from benchmarks.science.staleness import OBJECTIVES

OPTIONS = {"batches": [64, 256], "lags": [0, 512], **learning.OPTIONS}
"""`lags`: how many samples behind; each a multiple of every batch."""
QUICK = {"batches": [64, 128], "lags": [0, 128], **learning.QUICK}


def run(chosen: Any) -> Finding:
    settings = {
        f"{objective}, {lag}, {batch}": learning.Setting(algorithm, lag / batch, batch)
        for objective, algorithm in OBJECTIVES.items()
        for lag in chosen.lags
        for batch in chosen.batches
    }
    found = learning.pass_rates(settings, chosen)
    rows, lines, said = [], {}, []
    smallest, largest = min(chosen.batches), max(chosen.batches)
    for objective in OBJECTIVES:
        for lag in chosen.lags:
            name = f"{objective}, {lag} samples behind"
            of_batch = {batch: found[f"{objective}, {lag}, {batch}"] for batch in chosen.batches}
            estimates = {batch: Estimate.of(rates) for batch, rates in of_batch.items()}
            rows += [
                {
                    "objective": objective,
                    "samples behind": lag,
                    "batch": batch,
                    "eta": f"{lag / batch:g}",
                    "held-out pass rate": estimate.text(),
                }
                for batch, estimate in estimates.items()
            ]
            lines[name] = {f"{batch}": (e.mean, e.half) for batch, e in estimates.items()}
            effect = difference(of_batch[smallest], of_batch[largest])
            said.append(conclude(f"{name}: batch {largest} less batch {smallest}", effect))
    first, last = min(chosen.lags), max(chosen.lags)
    said += [
        conclude(
            f"{objective}, batch {batch}: {last} samples behind less {first}",
            difference(*(found[f"{objective}, {lag}, {batch}"] for lag in (first, last))),
        )
        for objective in OBJECTIVES
        for batch in chosen.batches
    ]
    draw = partial(draw_estimates, lines, x="batch, trajectories", y="held-out pass rate")
    return Finding({f"Held-out pass rate after {chosen.samples:,} samples": rows}, said, draw)
