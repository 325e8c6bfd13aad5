"""Batch size against eta: does staleness matter in versions or in samples?

A sample of eta versions before is eta times the batch behind, in samples. All runs train equally
many samples in updates of 32 trajectories, so that a larger batch has fewer versions and as many
updates. The algorithm is plain PPO, which staleness hurts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.plots import draw_estimates
from benchmarks.science import learning
from benchmarks.science.findings import Estimate, Finding, conclude, difference

PPO = {"name": "ppo"}
OPTIONS = {"batches": [64, 256], "lags": [0, 512], **learning.OPTIONS}
"""`lags`: how many samples behind; each a multiple of every batch."""
QUICK = {"batches": [64, 128], "lags": [0, 128], **learning.QUICK}


def run(chosen: Any) -> Finding:
    keys = [(lag, batch) for lag in chosen.lags for batch in chosen.batches]
    settings = {f"{lag}, {batch}": learning.Setting(PPO, lag / batch, batch) for lag, batch in keys}
    pass_rates = learning.pass_rates(settings, chosen)
    estimates = {key: Estimate.of(pass_rates["{}, {}".format(*key)]) for key in keys}
    rows = [
        {
            "samples behind": lag,
            "batch": batch,
            "eta": f"{lag / batch:g}",
            "held-out pass rate": estimate.text(),
        }
        for (lag, batch), estimate in estimates.items()
    ]
    lines = {
        f"{lag} samples behind": {
            f"{batch}": (estimates[lag, batch].mean, estimates[lag, batch].half)
            for batch in chosen.batches
        }
        for lag in chosen.lags
    }
    first, *_, last = chosen.lags
    smallest, *_, largest = chosen.batches
    conclusions = [
        conclude(
            f"{lag} samples behind: batch {largest} (eta {lag / largest:g}) less batch {smallest} "
            f"(eta {lag / smallest:g})",
            difference(pass_rates[f"{lag}, {smallest}"], pass_rates[f"{lag}, {largest}"]),
        )
        for lag in chosen.lags
    ] + [
        conclude(
            f"batch {batch}: {last} samples behind less {first}",
            difference(pass_rates[f"{first}, {batch}"], pass_rates[f"{last}, {batch}"]),
        )
        for batch in chosen.batches
    ]
    draw = partial(draw_estimates, lines, x="batch, trajectories", y="held-out pass rate")
    return Finding(
        {f"Held-out pass rate after {chosen.samples:,} samples": rows}, conclusions, draw
    )
