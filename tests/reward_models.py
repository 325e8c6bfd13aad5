"""Tiny reward models made on the spot, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from areal_flow.training.ranked_model import RankedModel
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.tensor_rows import first_model
from pipelines.tiny_jobs.tiny_policy import write_tiny_model


def write_reward_model(directory: Path, *, max_model_len: int = 256, num_labels: int = 1) -> Path:
    """Write a directory as a trained reward model has it, with random weights."""
    write_tiny_model(directory, max_model_len=max_model_len)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory, num_labels=num_labels)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(directory)
    return directory


def load_reward_model(directory: Path, description: Path) -> Any:
    """Return a reward model with a directory's layers, and scores drawn from seed 0."""
    model, weights = first_model(directory, seed=0, device="cpu", reward_model=description)
    held = RankedModel(model, TrainerSettings(), ReplicaGroup())
    if weights:
        held.load(weights)
    return model
