"""A model that vLLM's engines serve in tests, and its weights."""

from __future__ import annotations

from pathlib import Path

from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.rollout.engines.protocol import GenerationSettings
from tests.fakes import MemoryWriter

SETTINGS = GenerationSettings(engine="vllm", max_num_seqs=4, max_model_len=64, max_new_tokens=8)


def published(model: Path) -> MemoryWriter:
    """Return a writer that has published version 0 of a model."""
    writer = MemoryWriter()
    writer.stage(0, policy_tensors(load_policy(model)))
    writer.publish(0)
    return writer
