"""Tiny reward models made on the spot, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

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
