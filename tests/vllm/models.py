"""A model that vLLM's engines serve in tests, and its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operators(TorchDispatchMode):
    """Lists the operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def logits_of_vllm(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Return a linear head's logits, by vLLM's own layer with a head in float32."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    with set_current_vllm_config(VllmConfig()):
        processor = LogitsProcessor(len(weight_VH))
    processor.head_dtype = torch.float32
    head = SimpleNamespace(weight=weight_VH, quant_method=UnquantizedEmbeddingMethod(), tp_size=1)
    logits_TV: torch.Tensor = processor(head, hidden_TH, skip_gather=True)
    return logits_TV
