"""Corrections: the benefit of each off-policy correction under heavy staleness.

All runs train equally many samples, sampled by the policy of exactly eta versions before. `fresh`
is decoupled PPO on data of the newest policy: what there is to reach. The corrections are those of
`docs/algorithms.md`: TIS truncates the importance weight, IcePop masks tokens whose weight is
outside a floor and a cap, and the others bound what a token counts for by rules of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.plots import draw_bars
from benchmarks.science import learning
from benchmarks.science.findings import Estimate, Finding, conclude, difference

DECOUPLED: dict[str, Any] = {"name": "decoupled_ppo"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "decoupled PPO": DECOUPLED,
    "TIS, cap 2": {
        **DECOUPLED,
        "importance_weight_rule": "truncate",
        "importance_weight_cap": 2.0,
    },
    "IcePop, 0.5 to 5": {
        **DECOUPLED,
        "importance_weight_rule": "mask",
        "importance_weight_floor": 0.5,
    },
    "M2PO": {"name": "m2po"},
    "CISPO": {"name": "cispo"},
    "plain PPO": {"name": "ppo"},
}
FRESH = "fresh"
OPTIONS = {"eta": 8.0, **learning.OPTIONS}
QUICK = learning.QUICK


def run(chosen: Any) -> Finding:
    settings = {
        FRESH: learning.Setting(DECOUPLED, 0.0),
        **{name: learning.Setting(each, chosen.eta) for name, each in ALGORITHMS.items()},
    }
    pass_rates = learning.pass_rates(settings, chosen)
    estimates = {name: Estimate.of(rates) for name, rates in pass_rates.items()}
    lost = {
        name: difference(pass_rates[FRESH], rates)
        for name, rates in pass_rates.items()
        if name != FRESH
    }
    rows = [
        {
            "correction": name,
            "held-out pass rate": estimate.text(),
            "less than fresh": lost[name].text() if name in lost else "",
        }
        for name, estimate in estimates.items()
    ]
    conclusions = [conclude(f"{name} less {FRESH}", of) for name, of in lost.items()]
    draw = partial(
        draw_bars,
        {name: (of.mean, of.half) for name, of in lost.items()},
        x=f"held-out pass rate at eta {chosen.eta:g}, less that of fresh data",
        none=0.0,
    )
    title = f"Held-out pass rate after {chosen.samples:,} samples at eta {chosen.eta:g}"
    return Finding({title: rows}, conclusions, draw)
