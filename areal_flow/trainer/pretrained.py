"""A model directory's weights, of which a rank reads its own rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from areal_flow.errors import ModelError
from areal_flow.models.policy import empty_policy, load_policy, policy_tensors
from areal_flow.models.reward_model import load_reward_model
from areal_flow.recovery.checkpoints import ADAPTER_FILE, MODEL_FILE
from areal_flow.trainer.tensor_rows import Rows, rows_in_files, whole_rows

INDEX_FILE = f"{MODEL_FILE}.index.json"
"""Where a model directory has several files: which of them has which tensor."""

logger = logging.getLogger(__name__)


def first_model(
    directory: Path, *, seed: int, device: str, reward_model: Path | None = None
) -> tuple[Any, Rows | None]:
    """Return a directory's policy, or a reward model with its layers; what is not there is drawn.

    The weights of a policy that has any come apart from it.

    Args:
        reward_model: the directory of the reward model's configuration.
    """
    torch.manual_seed(seed)
    if reward_model:
        return load_reward_model(directory, reward_model, device=device), None
    if not any(directory.glob("*.safetensors")):
        return empty_policy(directory, device=device), None
    return pretrained_policy(directory)


def pretrained_policy(directory: Path) -> tuple[Any, Rows]:
    """Return a directory's policy without weights, and those."""
    policy = shapes_of(directory)
    return policy, _rows(directory, policy)


def shapes_of(directory: Path) -> Any:
    """Return a directory's architecture on the meta device."""
    with torch.device("meta"):
        return empty_policy(directory, device="meta")


def _rows(directory: Path, policy: Any) -> Rows:
    expected = policy_tensors(policy).keys()
    try:
        stored = rows_in_files(*_files(directory))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"expected a Hugging Face model directory with config.json and safetensors, "
            f"found {directory}: {error}"
        ) from error
    if expected <= stored.keys() and not (directory / ADAPTER_FILE).is_file():
        return {name: stored[name] for name in expected}
    # An architecture whose files have other names, or an adapter that is to be merged.
    logger.warning("%s: its tensors have other names, so each rank loads it whole", directory)
    return whole_rows(policy_tensors(load_policy(directory)))


def _files(directory: Path) -> list[Path]:
    if (index := directory / INDEX_FILE).is_file():
        return [
            directory / name for name in {*json.loads(index.read_text())["weight_map"].values()}
        ]
    return [directory / MODEL_FILE]
