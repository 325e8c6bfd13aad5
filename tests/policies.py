"""Small policies and training rows for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_flow.policy.models.attention import ATTENTION_NAME
from areal_flow.policy.models.linear import swap_linear_layers
from areal_flow.policy.models.lora import add_adapter, scale_adapter, split_adapter
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.settings import LoraSettings
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.sft import CompletionRows
from pipelines.tiny_jobs.tiny_policy import build_tokenizer, write_tiny_model


class KeepingWriter(HashingWriter):
    """A `WeightsWriter` that keeps a copy of the weights staged last."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> str:
        self.kept = {name: tensors[name].clone() for name in sorted(tensors)}
        return super().stage(version, self.kept)


def served_weights(
    backend: TrainerBackend, *, serves_adapter: bool = False
) -> dict[str, torch.Tensor]:
    """Return a copy of what a backend serves, in float32: merged weights, or an adapter alone."""
    tensors = backend.served_tensors(torch.float32, serves_adapter=serves_adapter)
    base, adapter = split_adapter({name: served.clone() for name, _, served in tensors})
    return adapter if serves_adapter else base


def small_policy(*, seed: int = 0, vocab_size: int = 13, tied: bool = False) -> Any:
    """Return a Qwen2 of a few thousand parameters, sharpened so that its choices matter."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = ATTENTION_NAME
    policy = Qwen2ForCausalLM(config).eval()
    swap_linear_layers(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return policy


def add_random_adapter(policy: Any, settings: LoraSettings, *, seed: int) -> None:
    """Add an adapter whose B is not zero, as after some training."""
    add_adapter(policy, settings, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)


def weights_with_scaled_adapter(policy: Any) -> dict[str, torch.Tensor]:
    """Return what a generator has of a policy whose adapter is served alone."""
    base, adapter = split_adapter(policy_tensors(policy))
    scale = scale_adapter(policy)
    return base | {name: scale(name, tensor) for name, tensor in adapter.items()}


def write_model_directory(directory: Path, *, seed: int = 0) -> Path:
    """Write a complete model directory: the tiny tokenizer and random weights."""
    from areal_flow.policy.models.policy import empty_policy

    write_tiny_model(directory, max_model_len=2048)
    torch.manual_seed(seed)
    empty_policy(directory).save_pretrained(directory)
    assert build_tokenizer().get_vocab_size() == empty_policy(directory).config.vocab_size
    return directory


def completion_rows(num: int, *, num_completions: int = 1) -> CompletionRows:
    """Return tokenised rows of short prompts, and of completions that differ in length."""
    random = np.random.default_rng(0)
    tokens: list[int] = []
    prompt_lengths, lengths = [], []
    for row in range(num):
        prompt = random.integers(1, 13, 2 + row % 3)
        for member in range(num_completions):
            completion = random.integers(1, 13, 2 + (row + 2 * member) % 5)
            tokens += [*prompt.tolist(), *completion.tolist()]
            prompt_lengths.append(len(prompt))
            lengths.append(len(prompt) + len(completion))
    return CompletionRows(
        np.array(tokens, np.int32),
        np.ones(len(tokens), np.bool_),
        np.array(prompt_lengths),
        np.array(lengths),
        num_completions,
    )
