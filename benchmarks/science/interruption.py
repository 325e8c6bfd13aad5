"""Interruption: its benefit for a generator that keeps getting new weights.

One engine always has more groups than it can run; completions have a heavy tail (204 tokens in the
mean, 2,048 at most). As soon as a batch of them has ended, new weights arrive. `drain` lets
completions that run end first, `interrupt` (the paper's) prefills them again, `keep` goes on with
old keys and values. A seed draws prompts and lengths; the rules take turns on it. Staleness of a
token is how many versions older than the newest one its version is when its completion ends. The
longest stall is the longest step of the engine. Time is the processor's, so that other work on the
machine does not count. The paper gained 12% to 17% by interruption on GPUs, where prefilling costs
less beside decoding.
"""

from __future__ import annotations

from functools import partial
from time import process_time
from typing import Any, get_args

import torch

from areal_flow.policy.models.policy import policy_from_config, policy_tensors
from areal_flow.rollout.engines.protocol import Interruption
from areal_flow.rollout.engines.torch_engine import TorchEngine
from benchmarks import harness, tailed_load
from benchmarks.plots import draw_bars
from benchmarks.science.findings import Estimate, Finding, conclude
from benchmarks.tailed_load import GROUP_SIZE, MODELS, TAILS, Load

OPTIONS = {"seeds": [0, 1, 2], "model": "0.6M", "updates": 3, "batch": 32, "max_num_seqs": 64}
QUICK = {"seeds": [0, 1], "updates": 1, "batch": 24, "max_num_seqs": 16}
DRAIN: Interruption = "drain"
SPEED = "tokens_per_processor_s"


def measure(policy: Any, load: Load, rule: Interruption, chosen: Any) -> dict[str, float]:
    """Decode until the last update's batch has ended; all tokens count, those of unended ones, too.

    The first batch is left out: before it has ended all rules are alike.
    """
    num_sampled = tailed_load.end_at_given_lengths(load)
    settings = tailed_load.settings_for(load, chosen.max_num_seqs, interruption=rule)
    engine = TorchEngine(policy, settings, version=0)
    tensors = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    tailed_load.add_all(engine, load)
    num_ended = num_tokens = num_stale = newest = num_before = 0
    stall_s = began = 0.0
    while num_ended < chosen.batch * (chosen.updates + 1):
        before = process_time()
        for _, completions in engine.step():
            num_ended += len(completions)
            for version, length in (span for c in completions for span in c.version_spans):
                num_tokens += length
                num_stale += length * (newest - version)
        if num_ended >= chosen.batch * (newest + 1):
            if newest == 0:
                began, num_before = process_time(), num_sampled[0]
            newest += 1
            engine.load_weights(tensors, version=newest)
        stall_s = max(stall_s, process_time() - before)
    return {
        SPEED: (num_sampled[0] - num_before) / (process_time() - began),
        "staleness": num_stale / num_tokens,
        "stall_ms": 1e3 * stall_s,
    }


def run(chosen: Any) -> Finding:
    torch.set_num_threads(1)
    config = MODELS[chosen.model]
    policy = policy_from_config(config)
    # Twice what is needed: slots must never be empty for lack of groups.
    num_groups = 2 * chosen.batch * (chosen.updates + 1) // GROUP_SIZE
    turns: dict[Interruption, list[dict[str, float]]] = {
        rule: [] for rule in get_args(Interruption)
    }
    for seed in chosen.seeds:
        load = tailed_load.random_load(num_groups, TAILS, config.vocab_size, seed=seed)
        ways = {rule: partial(measure, policy, load, rule, chosen) for rule in turns}
        for rule, measured in harness.take_turns(1, ways).items():
            turns[rule] += measured
    ratios = {
        rule: Estimate.of([turn[SPEED] / drained[SPEED] for turn, drained in pairs])
        for rule, measured in turns.items()
        if (pairs := [*zip(measured, turns[DRAIN], strict=True)])
    }
    rows = [
        {
            "rule": rule,
            **{
                name: Estimate.of([turn[name] for turn in measured]).text(2) for name in measured[0]
            },
            "speed over drain": ratios[rule].text(2),
        }
        for rule, measured in turns.items()
    ]
    others = {rule: ratio for rule, ratio in ratios.items() if rule != DRAIN}
    conclusions = [
        conclude(f"{rule}: speed over drain", ratio, nothing=1.0, num_decimals=2)
        for rule, ratio in others.items()
    ]
    bars: dict[str, tuple[float, float]] = {r: (x.mean, x.half) for r, x in others.items()}
    draw = partial(draw_bars, bars, x="tokens a processor second, over those of drain", none=1.0)
    return Finding(
        {"One engine, one thread, new weights after each batch": rows}, conclusions, draw
    )
