"""vLLM's turn in `benchmarks/generation.py`, which runs this in the interpreter that has vLLM.

Decodes the load twice, since the first time prepares, and prints the seconds of the second time.

    PYTHON -m benchmarks.generation_vllm MODEL_DIRECTORY MODEL GROUPS MAX_NUM_SEQS
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_flow.core.types import Sampling
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.rollout.engines.vllm import engine as vllm_engine
from areal_flow.rollout.engines.vllm.core import InProcessCore, engine_config
from areal_flow.rollout.engines.vllm.weights import ServedTensors
from benchmarks.harness import seconds_of
from benchmarks.tailed_load import MODELS, MODERATE, Load, random_load, run_all, settings_for


def end_at_given_lengths(load: Load) -> None:
    """End each completion at its own length: a member's seed is its place in the load."""
    lengths, parameters = load.lengths.ravel().tolist(), vllm_engine._parameters

    def of_member(sampling: Sampling, seed: int) -> Any:
        return parameters(replace(sampling, max_new_tokens=lengths[seed]), seed)

    vllm_engine._parameters = of_member


def main(directory: str, name: str, num_groups: str, max_num_seqs: str) -> None:
    model = Path(directory)
    load = random_load(int(num_groups), MODERATE, MODELS[name].vocab_size)
    settings = settings_for(load, int(max_num_seqs))
    tensors = policy_tensors(load_policy(model))
    core, served = InProcessCore(engine_config(model, settings)), ServedTensors(model)
    end_at_given_lengths(load)
    engine = vllm_engine.VLLMEngine(core, served, settings, tensors, version=0)
    run_all(engine, load)
    print(seconds_of(lambda: run_all(engine, load)))


if __name__ == "__main__":
    main(*sys.argv[1:])
