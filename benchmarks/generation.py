"""Tokens a second of the torch engine, and of static batches through `transformers.generate`.

Groups of eight complete random prompts of 32 tokens; each completion has a length of its own, drawn
from a lognormal distribution (sigma 1) and cut. Every way samples the same number of tokens with
the same model, sequences at a time and threads; a static batch goes on until its longest completion
ends. The ways take turns; the best of `--rounds` counts.

    python benchmarks/generation.py [--threads 1] [--rounds 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from areal_flow.generation.protocol import GenerationSettings
from areal_flow.generation.torch_engine import TorchEngine
from areal_flow.models.policy import assign_tensors, policy_from_config, policy_tensors
from benchmarks.tailed_load import (
    GROUP_SIZE,
    MODELS,
    PROMPT_TOKENS,
    Lengths,
    Load,
    end_at_given_lengths,
    random_load,
)


def by_engine(policy: Any, load: Load, max_num_seqs: int) -> Callable[[], None]:
    settings = GenerationSettings(
        max_num_seqs=max_num_seqs,
        max_new_tokens=load.longest,
        max_model_len=PROMPT_TOKENS + load.longest,
    )
    end_at_given_lengths(load)

    def run() -> None:
        engine = TorchEngine(policy, settings, version=0)
        for group in range(len(load.prompts)):
            engine.add(load.request(group))
        num_tokens = 0
        while engine.has_work():
            num_tokens += sum(len(c.tokens) for _, group in engine.step() for c in group)
        assert num_tokens == load.lengths.sum()

    return run


def by_static_batches(model: Any, load: Load, max_num_seqs: int) -> Callable[[], None]:
    groups = max_num_seqs // GROUP_SIZE

    @torch.inference_mode()
    def run() -> None:
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

    return run


def seconds_of(work: Callable[[], None]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--cut", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    table = Table("model", "way", "seconds", "tokens/s", "over generate")
    found: dict[str, dict[str, float | None]] = {}
    for name in chosen.models:
        config = MODELS[name]
        load = random_load(chosen.groups, Lengths(120, 1.0, chosen.cut), config.vocab_size)
        model = AutoModelForCausalLM.from_config(
            deepcopy(config), attn_implementation="sdpa"
        ).eval()
        model.generation_config.eos_token_id = None
        policy = policy_from_config(deepcopy(config))
        assign_tensors(policy, policy_tensors(model))
        ways = {
            "torch": by_engine(policy, load, chosen.max_num_seqs),
            "hf_generate": by_static_batches(model, load, chosen.max_num_seqs),
        }
        taken = {way: float("inf") for way in ways}
        for _ in range(chosen.rounds):
            for way, work in ways.items():
                taken[way] = min(taken[way], seconds_of(work))
        rates = {way: float(load.lengths.sum()) / seconds for way, seconds in taken.items()}
        for way, rate in rates.items():
            ratio = rate / rates["hf_generate"]
            table.add_row(name, way, f"{taken[way]:.2f}", f"{rate:,.0f}", f"{ratio:.2f}")
        found[name] = {**rates, "vllm": None}
    Console().print(table)
    if chosen.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        chosen.json.write_text(json.dumps({"machine": machine, "tokens_per_second": found}))


if __name__ == "__main__":
    main()
