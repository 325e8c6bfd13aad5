"""What interruption buys: one generator under a stream of new weights, by each of its three rules.

The generator always has more groups than it can run; completions are as long as those of
`tails.py`. As soon as a batch of them has ended, new weights arrive. `drain` lets completions that
run end first, `interrupt` prefills them again, `keep` goes on with old keys and values. The rules
take turns; the best round counts. Staleness of a token is how many versions older than the newest
one its version is when its completion ends. The longest stall is the longest step.

    python -m benchmarks.interruption [--model 0.6M] [--rounds 2] [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial
from time import perf_counter
from typing import Any, get_args

import torch

from areal_flow.generation.protocol import Interruption
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.policy import policy_from_config, policy_tensors
from benchmarks import harness, tailed_load
from benchmarks.tailed_load import GROUP_SIZE, MODELS, TAILS, Load


def measure(
    policy: Any, load: Load, rule: Interruption, chosen: argparse.Namespace
) -> dict[str, float]:
    """Decode until the last update's batch has ended."""
    settings = tailed_load.settings_for(load, chosen.max_num_seqs, interruption=rule)
    engine = TorchEngine(policy, settings, version=0)
    tensors = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    tailed_load.add_all(engine, load)
    num_tokens = num_stale = num_ended = newest = 0
    stall_s = 0.0
    began = perf_counter()
    while num_ended < chosen.batch * (chosen.updates + 1):
        before = perf_counter()
        for _, completions in engine.step():
            num_ended += len(completions)
            for version, length in (span for c in completions for span in c.version_spans):
                num_tokens += length
                num_stale += length * (newest - version)
        if num_ended >= chosen.batch * (newest + 1):
            newest += 1
            engine.load_weights(tensors, version=newest)
        stall_s = max(stall_s, perf_counter() - before)
    return {
        "tokens_per_s": num_tokens / (perf_counter() - began),
        "staleness": num_stale / num_tokens,
        "longest_stall_ms": 1e3 * stall_s,
    }


def main() -> None:
    numbers = {"rounds": 2, "updates": 4, "batch": 192, "max_num_seqs": 64}
    chosen = harness.parse_options(__doc__, choices={"model": MODELS}, model="0.6M", **numbers)
    torch.set_num_threads(1)
    config = MODELS[chosen.model]
    # Twice what is needed: slots must never be empty for lack of groups.
    num_groups = 2 * chosen.batch * (chosen.updates + 1) // GROUP_SIZE
    load = tailed_load.random_load(num_groups, TAILS, config.vocab_size)
    tailed_load.end_at_given_lengths(load)
    policy = policy_from_config(config)
    ways = {rule: partial(measure, policy, load, rule, chosen) for rule in get_args(Interruption)}
    turns = harness.take_turns(chosen.rounds, ways)
    best = {rule: max(turns[rule], key=lambda turn: turn["tokens_per_s"]) for rule in ways}
    drained = best["drain"]["tokens_per_s"]
    rows = [
        {"rule": rule, **turn, "over_drain": turn["tokens_per_s"] / drained}
        for rule, turn in best.items()
    ]
    harness.report(chosen.json, {"One generator, new weights after each batch": rows})


if __name__ == "__main__":
    main()
