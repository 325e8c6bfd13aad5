"""Policies and trajectories of given shapes, for random weights and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from areal_flow.core.types import VersionSpan
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.training.sequences import TrainingSequence


def qwen2_config(
    vocabulary: int, hidden: int, layers: int, *, heads: int, key_value_heads: int, **others: Any
) -> Qwen2Config:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "tie_word_embeddings": True,
    }
    return Qwen2Config(**{**sizes, **others})


def drawn_policy(config: Any, *, device: str = "cpu", dtype: str = "float32") -> Any:
    """Return a policy with random weights, drawn on its device: a CPU takes half a minute for 1.5B.

    Its configuration names its architecture, as a saved model's does.
    """
    with torch.device(device):
        policy = policy_from_config(config, dtype=dtype, device=device)
    policy.config.architectures = [type(policy).__name__]
    return policy


def random_policy(*sizes: int, device: str = "cpu", dtype: str = "float32", **others: Any) -> Any:
    """Return a policy of `qwen2_config`."""
    return drawn_policy(qwen2_config(*sizes, **others), device=device, dtype=dtype)


def random_trajectory(
    num_prompt: int,
    num_sampled: int,
    vocabulary: int,
    *,
    seed: int = 0,
    reward: float = 1.0,
    group: int = 0,
) -> TrainingSequence:
    """Return a trajectory that a uniform policy of version 0 sampled."""
    drawn = np.random.default_rng(seed).integers(0, vocabulary, num_prompt + num_sampled)
    tokens = drawn.astype(np.int32)
    return TrainingSequence(
        prompt_tokens=tokens[:num_prompt],
        output_tokens=tokens[num_prompt:],
        behavior_logprobs=np.full(num_sampled, -np.log(vocabulary), np.float32),
        trained=np.ones(num_sampled, np.bool_),
        reward=reward,
        group=group,
        version_spans=(VersionSpan(0, num_sampled),),
    )
