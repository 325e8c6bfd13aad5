"""What interruption buys: one generator under a stream of new weights, by each of its three rules.

The generator always has more groups than it can run. Completions are as long as those of
`tails.py`: 204 tokens in the mean, 2,048 at most. As soon as a batch of them has ended, new weights
are there. `drain` lets end what runs before it takes them, `interrupt` prefills it again, `keep`
goes on with old keys and values. The rules take turns; the best of `--rounds` counts. Staleness of
a token is how many versions older than the newest one its version is when its completion ends.

    python -m benchmarks.interruption [--model 0.6M] [--rounds 2] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from areal_flow.generation.protocol import GenerationSettings, Interruption
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.policy import policy_from_config, policy_tensors
from benchmarks.plots import draw_interruption
from benchmarks.tailed_load import (
    GROUP_SIZE,
    MODELS,
    PROMPT_TOKENS,
    TAILS,
    Load,
    end_at_given_lengths,
    random_load,
)


@dataclass(frozen=True)
class Measurement:
    """One rule's run: until the last update's batch has ended."""

    tokens_per_second: float
    staleness: float
    """Mean over tokens."""
    longest_stall_s: float
    """The longest step: a switch with what it computes again."""


def measure(
    policy: Any, load: Load, rule: Interruption, *, max_num_seqs: int, batch: int, updates: int
) -> Measurement:
    settings = GenerationSettings(
        max_num_seqs=max_num_seqs,
        max_new_tokens=load.longest,
        max_model_len=PROMPT_TOKENS + load.longest,
        interruption=rule,
    )
    engine = TorchEngine(policy, settings, version=0)
    tensors = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    for group in range(len(load.prompts)):
        engine.add(load.request(group))
    num_tokens = num_stale = num_ended = newest = 0
    stall = 0.0
    began = perf_counter()
    while num_ended < batch * (updates + 1):
        before = perf_counter()
        for _, completions in engine.step():
            num_ended += len(completions)
            for version, length in (span for c in completions for span in c.version_spans):
                num_tokens += length
                num_stale += length * (newest - version)
        if num_ended >= batch * (newest + 1):
            newest += 1
            engine.load_weights(tensors, version=newest)
        stall = max(stall, perf_counter() - before)
    return Measurement(num_tokens / (perf_counter() - began), num_stale / num_tokens, stall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="0.6M")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    config = MODELS[chosen.model]
    # Twice what is needed: slots must never be empty for want of groups.
    num_groups = 2 * chosen.batch * (chosen.updates + 1) // GROUP_SIZE
    load = random_load(num_groups, TAILS, config.vocab_size)
    end_at_given_lengths(load)
    policy = policy_from_config(config)
    found: dict[str, Measurement] = {}
    for _ in range(chosen.rounds):
        for rule in get_args(Interruption):
            one = measure(
                policy,
                load,
                rule,
                max_num_seqs=chosen.max_num_seqs,
                batch=chosen.batch,
                updates=chosen.updates,
            )
            if rule not in found or one.tokens_per_second > found[rule].tokens_per_second:
                found[rule] = one
    table = Table("rule", "tokens/s", "over drain", "staleness", "longest stall, ms")
    for rule, one in found.items():
        ratio = one.tokens_per_second / found["drain"].tokens_per_second
        stall_ms = f"{1e3 * one.longest_stall_s:.0f}"
        rate = f"{one.tokens_per_second:,.0f}"
        table.add_row(rule, rate, f"{ratio:.2f}", f"{one.staleness:.2f}", stall_ms)
    Console().print(table)
    report = {
        "machine": {"processor": platform.processor(), "torch": torch.__version__},
        "rules": {rule: asdict(one) for rule, one in found.items()},
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(report))
    if chosen.plot:
        draw_interruption(report, chosen.plot)


if __name__ == "__main__":
    main()
