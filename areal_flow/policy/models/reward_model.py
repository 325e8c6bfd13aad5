"""Reward models: a policy's layers, with one score after each token instead of logits.

Such a model is a plain `AutoModelForSequenceClassification` with one label. The score of a
completion is the one after its last token that is no stop token, as in `transformers`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_flow.core.errors import ConfigError, ModelError
from areal_flow.policy.models.attention import ATTENTION_NAME, RowLayout
from areal_flow.policy.models.huggingface import (
    AutoConfig,
    AutoModelForSequenceClassification,
)
from areal_flow.policy.models.policy import disable_dropout_and_move, hidden_at

SCORE = "score"
"""Name of the layer that scores hidden states, which a policy lacks."""


def describe_reward_model(directory: Path, *, pad_token_id: int) -> None:
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, num_labels=1)
    if config.pad_token_id is None:
        config.pad_token_id = pad_token_id
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        model = None
    if not hasattr(model, SCORE):
        raise ModelError(
            f"expected an architecture that transformers can make a reward model of, found "
            f"{config.model_type!r}: AutoModelForSequenceClassification knows none with a layer "
            f"{SCORE!r}"
        )
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)


def reward_model_of(description: Path, *, device: torch.device | str = "cpu") -> Any:
    """Return the reward model of a directory's configuration, with random weights."""
    config = AutoConfig.from_pretrained(str(description), local_files_only=True)
    return disable_dropout_and_move(_scoring_model(config, torch.float32), device)


def _scoring_model(config: Any, dtype: torch.dtype) -> Any:
    return AutoModelForSequenceClassification.from_config(
        config, dtype=dtype, attn_implementation=ATTENTION_NAME
    )


def drawn_scores(model: Any) -> Tensor:
    """Return random weights of the scoring layer, as `transformers` draws them."""
    deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    return torch.normal(0.0, deviation, model.score.weight.shape)


def critic_of(policy: Any, *, device: torch.device | str = "cpu") -> Any:
    """Return a model that scores with layers like a policy's; weights come later."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = config.pad_token_id or 0
    try:
        with torch.device(device):
            model = _scoring_model(config, policy.dtype)
        model.get_decoder()
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"algorithm.name 'ppo_critic': expected an architecture that transformers can make a "
            f"scoring model of, found {config.model_type!r}; take an algorithm without a critic"
        ) from error
    return disable_dropout_and_move(model, device)


def is_reward_model(model: Any) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def scores_at(model: Any, input_ids_1T: Tensor, layout: RowLayout, positions_M: Tensor) -> Tensor:
    """Return a reward model's scores after some tokens of a packed row: `[M]`, float32."""
    hidden_MH = hidden_at(model, input_ids_1T, layout, positions_M)
    with torch.autocast(hidden_MH.device.type, enabled=False):
        scores_M1 = model.score(hidden_MH.to(model.dtype))
    # No view: FSDP has hooks on the output of a pass, which a view that changes would lose.
    return scores_M1[:, 0].float().clone()  # type: ignore[no-any-return]
