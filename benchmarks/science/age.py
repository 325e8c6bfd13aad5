"""A surprise: eq. 3 of the paper does not bound the age of a token.

The paper admits new work while floor((N - 1) / B) <= i + eta (arXiv 2505.24298, eq. 3), which
bounds how many samples run ahead of the trainer. A completion that decodes for longer than a few
steps is overtaken: the trainer takes what is complete, the version moves on, and the long one is
trained when its first tokens are older than eta. Eq. 3 holds all the while. The longest completions
are the oldest, so a bound on age that masks or drops tokens falls on them first.

Measured in virtual time with the project's own controller and gate, before its mask: 16
generators, batches of 256 in groups of 8, lognormal lengths of one mean and of three tails.
Trajectories all of whose tokens are too old are not among these: the buffer discards them.
At eta 8 the generators' slots (1,024) bound what is in flight, not eq. 3 (2,304).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.plots import draw_estimates
from benchmarks.science import virtual
from benchmarks.science.findings import Estimate, Finding, conclude

SIGMAS = (0.3, 1.0, 1.5)
OPTIONS = {"seeds": [0, 1, 2], "etas": [1, 2, 4, 8], "steps": 40, "skip": 20}
QUICK = {"seeds": [0, 1], "etas": [1, 2], "steps": 8, "skip": 4}
NUM_GENERATORS, NUM_TRAINERS = 16, 5


def measure(sigma: float, eta: int, seed: int, chosen: Any) -> tuple[float, int]:
    """Return the share of tokens that are older than eta, and the greatest age."""
    simulated = virtual.simulated(
        chosen,
        num_generators=NUM_GENERATORS,
        num_trainers=NUM_TRAINERS,
        eta=eta,
        seed=seed,
        sigma=sigma,
    )
    return sum(share for age, share in simulated.ages.items() if age > eta), max(simulated.ages)


def run(chosen: Any) -> Finding:
    keys = [(sigma, eta) for sigma in SIGMAS for eta in chosen.etas]
    calls = [(*key, seed, chosen) for key in keys for seed in chosen.seeds]
    environment = {"OMP_NUM_THREADS": "1"}
    turns = harness.in_processes(measure, calls, environment, num_processes=chosen.processes)
    by_case = {
        key: turns[at * len(chosen.seeds) : (at + 1) * len(chosen.seeds)]
        for at, key in enumerate(keys)
    }
    shares = {key: Estimate.of([share for share, _ in turns]) for key, turns in by_case.items()}
    rows = [
        {
            "sigma of lengths": f"{sigma:g}",
            "eta": eta,
            "tokens older than eta, %": shares[sigma, eta].text(2, 100),
            "oldest token": max(oldest for _, oldest in by_case[sigma, eta]),
        }
        for sigma, eta in keys
    ]
    conclusions = [
        conclude(
            f"sigma {sigma:g}, eta {eta}: share of tokens older than eta",
            shares[sigma, eta],
        )
        for sigma in SIGMAS[1:]
        for eta in chosen.etas
    ]
    lines = {
        f"sigma {sigma:g}": {
            f"{eta}": (100 * shares[sigma, eta].mean, 100 * shares[sigma, eta].half)
            for eta in chosen.etas
        }
        for sigma in SIGMAS
    }
    draw = partial(draw_estimates, lines, x="eta", y="% of tokens older than eta")
    title = f"Tokens that were given to the trainer, steps {chosen.skip + 1} to {chosen.steps}"
    return Finding({title: rows}, conclusions, draw)
