"""Tokens a second of the torch engine, of vLLM, and of static batches through `generate`.

Groups of eight complete random prompts of 32 tokens; completions have lognormal lengths (sigma 1).
All ways have the same weights, tokens, threads and sequences at a time, and take turns; the best
round counts. A static batch of `transformers.generate` goes on until its longest completion ends.
vLLM takes part if an interpreter that has it is named, with this adapter and no compilation. Last,
what a token costs the torch engine while 8, 32, 128 and 256 sequences decode, all as long.

With `--model DIR` a real policy takes their place: tokens of a processor second, of the torch
engine while 16, 32 and 64 sequences decode, and of the trainer's steps on 64 completions.

    python -m benchmarks.generation [--threads 2] [--vllm PYTHON] [--only-costs] [--json FILE]
        [--model DIR] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.policy.models.policy import (
    assign_tensors,
    load_policy,
    policy_from_config,
    policy_tensors,
)
from areal_flow.rollout.engines.torch_engine import TorchEngine
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from benchmarks import harness, tailed_load
from benchmarks.harness import seconds_of
from benchmarks.shapes import random_trajectory
from benchmarks.tailed_load import GROUP_SIZE, MODELS, MODERATE, Load, end_at_given_lengths

ACTIVE = (8, 32, 128, 256)
"""Sequences that decode at a time where the cost of a token is measured."""
ACTIVE_TOKENS = 48

ACTIVE_OF_MODEL = (16, 32, 64)
SHORT = tailed_load.Lengths(median=40, sigma=0.7, cut=160)
"""Of the completions that a real policy is trained on."""

Way = Callable[[], float]
"""Decodes the whole load; returns the seconds that it took."""


def by_engine(policy: Any, load: Load, max_num_seqs: int) -> Way:
    settings = tailed_load.settings_for(load, max_num_seqs)

    def run() -> float:
        end_at_given_lengths(load)
        return seconds_of(
            lambda: tailed_load.run_all(TorchEngine(policy, settings, version=0), load)
        )

    return run


def by_static_batches(model: Any, load: Load, max_num_seqs: int) -> Way:
    groups = max_num_seqs // GROUP_SIZE

    @torch.inference_mode()
    def generate() -> None:
        for start in range(0, len(load.prompts), groups):
            prompts = load.prompts[start : start + groups].repeat(GROUP_SIZE, axis=0)
            longest = int(load.lengths[start : start + groups].max())
            ids = torch.from_numpy(prompts)
            mask = torch.ones_like(ids)
            bounds = {"min_new_tokens": longest, "max_new_tokens": longest, "pad_token_id": 0}
            model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **bounds)

    return lambda: seconds_of(generate)


def by_vllm(model: Any, directory: str, name: str, chosen: argparse.Namespace) -> Way:
    model.save_pretrained(directory)
    module = [chosen.vllm, "-m", "benchmarks.generation_vllm", directory, name]
    command = [*module, str(chosen.groups), str(chosen.max_num_seqs)]
    threads = {"OMP_NUM_THREADS": str(chosen.threads), "OMP_WAIT_POLICY": "passive"}
    return lambda: float(harness.output_of(command, added=threads).splitlines()[-1])


def measure_ways(
    model: Any, policy: Any, name: str, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    load = tailed_load.random_load(chosen.groups, MODERATE, MODELS[name].vocab_size)
    ways = {"torch": by_engine(policy, load, chosen.max_num_seqs)}
    with TemporaryDirectory() as directory:
        if chosen.vllm:
            ways["vllm"] = by_vllm(model, directory, name, chosen)
        ways["generate"] = by_static_batches(model, load, chosen.max_num_seqs)
        best = {way: min(turns) for way, turns in harness.take_turns(chosen.rounds, ways).items()}
    rates = {way: float(load.lengths.sum()) / seconds for way, seconds in best.items()}
    return [
        {"model": name, "way": way, "tokens_per_s": rate, "over_generate": rate / rates["generate"]}
        for way, rate in rates.items()
    ]


def measure_costs(policy: Any, name: str, num_rounds: int) -> dict[str, Any]:
    """Return the microseconds of a token while 8, 32, 128 and 256 sequences decode."""
    ways = {f"{active} active": partial(seconds_per_token, policy, active) for active in ACTIVE}
    turns = harness.take_turns(num_rounds, ways)
    return {"model": name, **{way: 1e6 * min(seconds) for way, seconds in turns.items()}}


def seconds_per_token(
    policy: Any, num_active: int, *, clock: Callable[[], float] = perf_counter
) -> float:
    """Return the seconds per token while this many sequences decode after prefill."""
    num_groups = num_active // GROUP_SIZE
    prompts = tailed_load.random_load(num_groups, MODERATE, policy.config.vocab_size)
    load = Load(prompts.prompts, np.full((num_groups, GROUP_SIZE), ACTIVE_TOKENS))
    end_at_given_lengths(load)
    engine = TorchEngine(policy, tailed_load.settings_for(load, num_active), version=0)
    tailed_load.add_all(engine, load)
    for _ in range(ACTIVE_TOKENS // 4):
        engine.step()
    running = engine._scheduler.running.values()
    assert len(running) == num_active
    num_tokens = sum(ACTIVE_TOKENS - len(sequence.tokens) for sequence in running)

    def decode() -> None:
        while engine.has_work():
            engine.step()

    return seconds_of(decode, clock=clock) / num_tokens


def measure_model(chosen: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second of a model directory's policy, in both roles."""
    policy = load_policy(chosen.model, dtype=chosen.dtype)
    best = harness.take_turns(
        chosen.rounds,
        {n: partial(seconds_per_token, policy, n, clock=process_time) for n in ACTIVE_OF_MODEL},
    )
    rates = {f"{active} active": 1 / min(seconds) for active, seconds in best.items()}
    settings = TrainerSettings(dtype=chosen.dtype, learning_rate=1e-6)
    backend = TrainerBackend(load_policy(chosen.model), settings)
    load = tailed_load.random_load(64 // GROUP_SIZE, SHORT, policy.config.vocab_size)
    sequences = [
        replace(
            random_trajectory(1, length, policy.config.vocab_size, reward=member % 2, group=group),
            prompt_tokens=load.prompts[group].astype(np.int32),
        )
        for group, lengths in enumerate(load.lengths.tolist())
        for member, length in enumerate(lengths)
    ]
    step_settings = StepSettings(DecoupledPPO(num_minibatches=1), temperature=1.0, seed=0)
    steps = [
        partial(train_step, backend, sequences, step=step, settings=step_settings)
        for step in range(1, chosen.rounds + 1)
    ]
    seconds = [seconds_of(step, clock=process_time) for step in steps]
    return {**rates, "training": sum(each.num_tokens for each in sequences) / min(seconds)}


def main() -> None:
    numbers = {"threads": 1, "rounds": 2, "groups": 32, "max_num_seqs": 64}
    names = {"models": list(MODELS), "vllm": str, "only_costs": False}
    names |= {"model": str, "dtype": "float32"}
    chosen = harness.parse_options(__doc__, choices={"models": MODELS}, **numbers, **names)
    torch.set_num_threads(chosen.threads)
    if chosen.model:
        harness.report(
            chosen.json, {f"Tokens a processor second, {chosen.dtype}": [measure_model(chosen)]}
        )
        return
    speeds, costs = [], []
    for name in chosen.models:
        config = deepcopy(MODELS[name])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        model.generation_config.eos_token_id = None
        policy = policy_from_config(deepcopy(MODELS[name]))
        assign_tensors(policy, policy_tensors(model))
        if not chosen.only_costs:
            speeds += measure_ways(model, policy, name, chosen)
        costs.append(measure_costs(policy, name, chosen.rounds))
    tables = {"Tokens a second": speeds, "Microseconds a token": costs}
    harness.report(chosen.json, tables)


if __name__ == "__main__":
    main()
