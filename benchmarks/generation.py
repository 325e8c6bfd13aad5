"""Tokens a second of the torch engine, of vLLM, and of static batches through `generate`.

Groups of eight complete random prompts of 32 tokens; each completion has a length of its own, drawn
from a lognormal distribution (sigma 1) and cut. Every way samples the same number of tokens with
the same weights, sequences at a time and threads; a static batch of `transformers.generate` goes on
until its longest completion ends. The ways take turns; the best of `--rounds` counts. vLLM takes
part if an interpreter that has it is named, with this adapter and no compilation.

Then what a token costs the torch engine while 8, 32, 128 and 256 sequences decode, all as long,
beside its floor: the operations of a step by the rate at which this process multiplies matrices, or
the bytes of weights, keys and values by the rate at which it reads memory, whichever takes longer.

    python benchmarks/generation.py [--threads 2] [--vllm PYTHON] [--rounds 2] [--only-costs]
                                    [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.policy import assign_tensors, policy_from_config, policy_tensors
from areal_flow.trainer.flops import matrix_rate
from benchmarks.tailed_load import (
    GROUP_SIZE,
    MODELS,
    PROMPT_TOKENS,
    Load,
    end_at_given_lengths,
    moderate_tails,
    random_load,
    run_all,
    seconds_of,
    settings_for,
)

ROOT = Path(__file__).parents[1]
ACTIVE = (8, 32, 128, 256)
"""Sequences that decode at a time where the cost of a token is measured."""
ACTIVE_TOKENS = 48

Way = Callable[[], float]
"""Does the whole load; returns the seconds that it took."""


def by_engine(policy: Any, load: Load, max_num_seqs: int) -> Way:
    settings = settings_for(load, max_num_seqs)

    def run() -> float:
        end_at_given_lengths(load)
        return seconds_of(lambda: run_all(TorchEngine(policy, settings, version=0), load))

    return run


def by_static_batches(model: Any, load: Load, max_num_seqs: int) -> Way:
    groups = max_num_seqs // GROUP_SIZE

    @torch.inference_mode()
    def generate() -> None:
        for start in range(0, len(load.prompts), groups):
            prompts = load.prompts[start : start + groups].repeat(GROUP_SIZE, axis=0)
            longest = int(load.lengths[start : start + groups].max())
            ids = torch.from_numpy(prompts)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )

    return lambda: seconds_of(generate)


@contextmanager
def by_vllm(model: Any, name: str, chosen: argparse.Namespace) -> Iterator[Way]:
    """Keep vLLM's interpreter for as long as turns are taken."""
    threads = {"OMP_NUM_THREADS": str(chosen.threads), "OMP_WAIT_POLICY": "passive"}
    load = map(str, (name, chosen.groups, chosen.cut, chosen.max_num_seqs))
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        command = [chosen.vllm, "-m", "benchmarks.generation_vllm", directory, *load]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=os.environ | threads | {"PYTHONPATH": str(ROOT)},
        ) as process:
            turns, answers = process.stdin, process.stdout
            assert turns is not None
            assert answers is not None
            if "ready\n" not in answers:
                raise SystemExit(f"{chosen.vllm} cannot run vLLM: see above")

            def run() -> float:
                turns.write("go\n")
                return float(answers.readline())

            yield run
            turns.close()


def seconds_per_token(policy: Any, num_active: int) -> float:
    """Return what a token costs while so many sequences decode; their prompts are prefilled."""
    lengths = np.full((num_active // GROUP_SIZE, GROUP_SIZE), ACTIVE_TOKENS)
    prompts = random_load(
        len(lengths), moderate_tails(ACTIVE_TOKENS), policy.config.vocab_size
    ).prompts
    load = Load(prompts, lengths)
    end_at_given_lengths(load)
    engine = TorchEngine(policy, settings_for(load, num_active), version=0)
    for group in range(len(prompts)):
        engine.add(load.request(group))
    for _ in range(ACTIVE_TOKENS // 4):
        engine.step()
    running = engine._scheduler.running.values()
    assert len(running) == num_active
    num_tokens = sum(ACTIVE_TOKENS - len(sequence.tokens) for sequence in running)

    def decode() -> None:
        while engine.has_work():
            engine.step()

    return seconds_of(decode) / num_tokens


def floor_per_token(policy: Any, num_active: int) -> float:
    """Return the least seconds that a token can take while so many sequences decode."""
    config, num_weights = policy.config, sum(p.numel() for p in policy.parameters())
    width = config.hidden_size
    key_values = 2 * width // config.num_attention_heads * config.num_key_value_heads
    length = PROMPT_TOKENS + 5 * ACTIVE_TOKENS / 8  # in the mean of the tokens that are timed
    numbers_read = num_weights + num_active * config.num_hidden_layers * key_values * length
    attention = config.num_hidden_layers * 2 * width * length
    operations = 2.0 * num_active * (num_weights + attention)
    computing = operations / matrix_rate("cpu", "float32")
    return max(computing, 4.0 * numbers_read / bytes_per_second()) / num_active


@lru_cache
def bytes_per_second() -> float:
    """Return how quickly this process reads memory that no cache holds."""
    numbers = torch.ones(2**26)
    return float(numbers.nbytes / min(seconds_of(lambda: numbers.sum()) for _ in range(5)))


def best_of(rounds: int, ways: dict[Any, Way]) -> dict[Any, float]:
    """Return the shortest time of each way; they take turns."""
    taken = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, work in ways.items():
            taken[way] = min(taken[way], work())
    return taken


def measure(
    name: str, chosen: argparse.Namespace
) -> tuple[dict[str, float], dict[int, float], dict[int, float]]:
    """Return tokens a second by way; a token's seconds, and their floor, by active sequences."""
    config = MODELS[name]
    load = random_load(chosen.groups, moderate_tails(chosen.cut), config.vocab_size)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    policy = policy_from_config(deepcopy(config))
    assign_tensors(policy, policy_tensors(model))
    ways = {"torch": by_engine(policy, load, chosen.max_num_seqs)}
    with ExitStack() as running:
        if chosen.vllm:
            ways["vllm"] = running.enter_context(by_vllm(model, name, chosen))
        ways["hf_generate"] = by_static_batches(model, load, chosen.max_num_seqs)
        taken = {} if chosen.only_costs else best_of(chosen.rounds, ways)
    costs = best_of(
        chosen.rounds, {active: partial(seconds_per_token, policy, active) for active in ACTIVE}
    )
    floors = {active: floor_per_token(policy, active) for active in ACTIVE}
    return (
        {way: float(load.lengths.sum()) / seconds for way, seconds in taken.items()},
        costs,
        floors,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--cut", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--only-costs", action="store_true", help="measure no other way")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    speeds = Table("model", "way", "tokens/s", "over generate")
    costs = Table("model", *(f"{active} active, us a token" for active in ACTIVE), "dearest")
    rates: dict[str, dict[str, float | None]] = {}
    seconds: dict[str, dict[int, float]] = {}
    floors: dict[str, dict[int, float]] = {}
    for name in chosen.models:
        found, seconds[name], floors[name] = measure(name, chosen)
        for way, rate in found.items():
            speeds.add_row(name, way, f"{rate:,.0f}", f"{rate / found['hf_generate']:.2f}")
        each = seconds[name].values()
        ratio = f"{max(each) / min(each):.2f} times"
        costs.add_row(name, *(f"{1e6 * cost:.1f}" for cost in each), ratio)
        least = [floors[name][active] for active in ACTIVE]
        costs.add_row("its floor", *(f"{1e6 * floor:.1f}" for floor in least), "")
        over = (f"{cost / floor:.2f}" for cost, floor in zip(each, least, strict=True))
        costs.add_row("over its floor", *over, "")
        rates[name] = {"vllm": None, **found}
    Console().print(speeds, costs)
    if chosen.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        figures = {
            "machine": machine,
            "arguments": {key: str(value) for key, value in vars(chosen).items()},
            "tokens_per_second": rates,
            "seconds_per_token_by_active_sequences": seconds,
            "floor_by_active_sequences": floors,
        }
        chosen.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
