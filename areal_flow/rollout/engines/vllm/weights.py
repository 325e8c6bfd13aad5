"""The policy's weights in vLLM's form, and a check that vLLM computes the same with them.

vLLM fails silently: a missing tensor is a warning, a head that is tied to the embedding keeps its
old values, and on the CPU so do experts. So names and shapes are compared before loading, and
log-probabilities after the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Completion, GroupRequest, Sampling, Tokens, as_tokens
from areal_flow.policy.models.huggingface import revert_weight_conversion
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import assign_tensors, empty_policy, logits_at, policy_with
from areal_flow.rollout.engines.protocol import EngineCore, GenerationSettings

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.5}
"""Maximum mean difference of log-probabilities from rounding; a wrong tensor makes more."""
NUM_CHECKED = 16


class ServedTensors:
    """Names and shapes of the policy's weights, and their names in a checkpoint."""

    def __init__(self, model: Path) -> None:
        self._policy = empty_policy(model, device="meta")
        self.tied: dict[str, str] = dict(self._policy.all_tied_weights_keys)
        """Names that are not stored, with the names whose tensors they share."""

    def checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the policy's weights by their names in a checkpoint, which are vLLM's."""
        assign_tensors(self._policy, tensors)  # compares names and shapes
        return dict(revert_weight_conversion(self._policy, dict(tensors)))


def check_logprobs(
    core: EngineCore, model: Path, tensors: Mapping[str, Tensor], settings: GenerationSettings
) -> None:
    """Refuse a model if an idle engine computes other log-probabilities than the trainer would.

    The policy computes on the CPU, with these tensors: the engine fills the GPU, and main memory
    may have no room for a copy.
    """
    policy = policy_with(model, tensors, dtype=settings.dtype)
    num_new = min(NUM_CHECKED, settings.max_model_len - 1)
    prompt = as_tokens([policy.config.vocab_size // 2])
    core.add(GroupRequest("check", prompt, (0, 1), Sampling(num_new)))
    completions: list[Completion] = []
    while core.has_work():
        completions += [each for _, group in core.step() for each in group]
    difference = _difference(policy, prompt, completions)
    tolerance = TOLERANCES[settings.vllm.quantization or settings.dtype]
    if not difference <= tolerance:
        raise ModelError(
            f"vLLM does not compute {model} as its own forward does: log-probabilities differ by "
            f"{difference:.2g} in the mean, expected at most {tolerance:g}: set "
            "generation.engine to 'torch'"
        )


@torch.no_grad()
def _difference(policy: Any, prompt: Tokens, completions: Sequence[Completion]) -> float:
    """Return the mean difference of log-probabilities, from one pass over all completions."""
    ids = [np.concatenate((prompt, each.tokens)) for each in completions]
    layout = PackedLayout([len(each) for each in ids])
    ids_T = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    positions = [places[len(prompt) - 1 : -1] for places in layout.places]
    positions_M = torch.from_numpy(np.concatenate(positions))
    logprobs_MV = logits_at(policy, ids_T[None], layout, positions_M).float().log_softmax(dim=1)
    expected_M = logprobs_MV.gather(1, ids_T[positions_M + 1, None])[:, 0]
    served_M = torch.from_numpy(np.concatenate([each.logprobs for each in completions]))
    return float((expected_M - served_M).abs().mean())
