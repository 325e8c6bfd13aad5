"""Writes a small policy with random weights whose completions end only at the length limit."""

from __future__ import annotations

from pathlib import Path

import torch

from areal_flow.policy.models.policy import empty_policy
from areal_flow.policy.tokenizer.directory import stop_token_ids
from pipelines.tiny_jobs.tiny_policy import write_tiny_model


def write_endless_policy(directory: Path, *, max_model_len: int) -> None:
    """Write the default policy into a new directory; completions end only at the length limit."""
    write_tiny_model(directory, max_model_len=max_model_len)
    torch.manual_seed(0)
    policy = empty_policy(directory)
    with torch.no_grad():  # feature 0 stays the same in every layer, and speaks against the end
        policy.model.embed_tokens.weight[:, 0] = 4
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        policy.lm_head.weight[:, 0] = 0
        policy.lm_head.weight[stop_token_ids(directory), 0] = -30
    policy.save_pretrained(directory)
