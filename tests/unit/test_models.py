"""Models in training: without dropout, recognised by type, tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, OPTConfig, PretrainedConfig

from areal_flow.config import build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.policy.models.policy import policy_from_config, policy_tensors
from areal_flow.policy.models.reward_model import critic_of, is_reward_model
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.head import token_logprobs
from areal_flow.training.rank import TrainerRank
from areal_flow.training.sequences import pack_sequences
from areal_flow.training.settings import SftSettings, TrainerSettings
from areal_flow.training.sft import SftTrainer
from tests.policies import completion_rows, small_policy
from tests.unit.test_trainer import make_sequences

NOISY = MixtralConfig(
    vocab_size=13,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=1,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
    router_jitter_noise=0.9,
)
"""Experts that have noise at their router in training mode."""

DROPPING = OPTConfig(
    vocab_size=13,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    dropout=0.5,
    pad_token_id=0,
)
"""Layers that drop by a function, in training mode."""


def as_ranks_train(policy: Any, path: Path, activations: str) -> None:
    recipe = build_recipe({"trainer": {"activations": activations}}, source="")
    channel = HashingWriter()
    TrainerRank(
        RunLayout(path), recipe.for_trainer(), channel=channel, read_rows=lambda _: []
    ).adopt(policy)


def as_fine_tuning_trains(policy: Any, _: Path, activations: str) -> None:
    settings = TrainerSettings(activations=activations)  # type: ignore[arg-type]
    SftTrainer(policy, completion_rows(4), SftSettings(num_steps=1), settings, seed=0)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("prepare", [as_ranks_train, as_fine_tuning_trains])
@pytest.mark.parametrize("config", [NOISY, DROPPING], ids=["noisy", "dropping"])
def test_policy_computes_in_training_what_it_computed_when_it_was_probed(
    tmp_path: Path, config: PretrainedConfig, prepare: Any, activations: str
) -> None:
    """Recomputed layers have the gradients of their first computation."""
    policy, micro = policy_from_config(config), pack_sequences(make_sequences())

    def logprobs_and_gradients() -> list[torch.Tensor]:
        policy.zero_grad()
        logprobs_M = token_logprobs(policy, micro, temperature=1.0)
        logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
        return [logprobs_M.detach(), *(parameter.grad for parameter in policy.parameters())]

    expected = logprobs_and_gradients()
    prepare(policy, tmp_path, activations)
    for actual, before in zip(logprobs_and_gradients(), expected, strict=True):
        torch.testing.assert_close(actual, before, atol=0, rtol=0)


def test_critic_has_no_dropout() -> None:
    critic, micro = critic_of(policy_from_config(NOISY)), pack_sequences(make_sequences())
    torch.nn.init.ones_(critic.score.weight)
    first, second = (token_logprobs(critic, micro, temperature=1.0) for _ in range(2))
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def test_reward_model_is_recognised_by_its_kind() -> None:
    policy = small_policy()
    assert is_reward_model(critic_of(policy))
    policy.score = torch.nn.Linear(2, 2)
    assert not is_reward_model(policy)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_without_memory_have_names_of_their_own(tied: bool) -> None:
    names = policy_tensors(small_policy(tied=tied)).keys()
    assert ("lm_head.weight" in names) != tied
    with torch.device("meta"):
        assert policy_tensors(small_policy(tied=tied)).keys() == names
