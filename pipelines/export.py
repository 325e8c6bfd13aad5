"""Writes a checkpoint as a plain Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal_flow.errors import ModelError

_TRAINING_ONLY = ("optimizer.safetensors", "state.json")


def export(source: Path, directory: Path) -> None:
    """Copy a checkpoint's configuration, tokenizer and weights.

    Raises:
        ModelError: the directory is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ModelError(f"{directory} is not empty; give a new directory")
    shutil.copytree(
        source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_TRAINING_ONLY)
    )
    print(f"Exported {source} to {directory}. Load it with:")
    print(f"  transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})")
