"""Model directories without torch: resolve a name, check what is needed, read stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_COPIED = ("model.safetensors.index.json", "state.json")


def resolve_model(name: str) -> Path:
    """Return the directory of a model: a local one, or a snapshot of a hub repository.

    Raises:
        ModelError: there is no such directory and the hub does not have it.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"expected a model directory or a hub name like org/model, found {name!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_COPIED, "*.safetensors"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name!r} is no directory here and could not be downloaded: {error}. "
            "Download it elsewhere and give its directory"
        ) from error


def check_model_directory(directory: Path) -> None:
    """Refuse a directory that cannot be trained.

    Raises:
        ModelError: naming the file that is missing and how to make it.
    """
    needed = {
        "config.json": "save the model with save_pretrained",
        "tokenizer.json": "save a fast tokenizer beside the model with save_pretrained",
    }
    for file, advice in needed.items():
        if not (directory / file).is_file():
            raise ModelError(f"{directory} has no {file}: {advice}")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has no *.safetensors; other weight formats are not loaded")


def copy_model_description(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer, without weights."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copy(file, target / file.name)


def tokenizer_of(directory: Path) -> Tokenizer:
    """Return the directory's fast tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json.

    Raises:
        ModelError: neither names one, so that a completion could never stop.
    """
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        found: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise ModelError(f"{directory}: config.json names no eos_token_id")
