"""Model directories: their names, checks of their files, their tokenizers and chat templates.

Nothing here imports torch; `models.probe` checks whether a model can be computed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Tokens
from areal_flow.policy.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS_AT_ONCE = 1 << 16
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", _MORE_TEMPLATES)
_NOT_COPIED = ("model.safetensors.index.json", "state.json")


def resolve_model(name: str) -> Path:
    directory = Path(name).expanduser()
    refuse_gguf(directory)
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


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a folder that has weights in such files alone."""
    files = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")):
        return
    source = f"{str(files[0].parent)!r}, gguf_file={files[0].name!r}"
    raise ModelError(
        f"{path}: GGUF is not trained: give the model that it was made from, since its weights are "
        "quantised and transformers loses rules of its tokenizer. Where there is no other, convert "
        "it into a new directory (`pip install gguf accelerate`):\n"
        f"  model = AutoModelForCausalLM.from_pretrained({source}, dtype='bfloat16')\n"
        "  del model.config.quantization_config, model.hf_quantizer\n"
        f"  for each in (model, AutoTokenizer.from_pretrained({source})): "
        "each.save_pretrained('NEW')"
    )


def check_model_directory(directory: Path) -> None:
    required = {
        "config.json": ": save the model with save_pretrained",
        "tokenizer.json": ": save a fast tokenizer beside the model with save_pretrained",
        "*.safetensors": "; other weight formats are not loaded",
    }
    for pattern, advice in required.items():
        if not any(directory.glob(pattern)):
            raise ModelError(f"{directory} has no {pattern}{advice}")
    if (vocab_size := vocab_size_of(directory)) is not None:
        try:
            tokens = tokenizer_of(directory).get_vocab()
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ModelError(f"{directory}/tokenizer.json cannot be read: {error}") from error
        if too_large := [token for token, index in tokens.items() if index >= vocab_size]:
            raise ModelError(
                f"{directory}: expected a tokenizer with ids below the model's vocab_size "
                f"({vocab_size}), found {len(too_large)} beyond it, such as {too_large[0]!r}: use "
                "the tokenizer that the model was trained with"
            )
        for stop in stop_token_ids(directory):
            if not 0 <= stop < vocab_size:
                raise ModelError(
                    f"{directory}: expected an eos_token_id below the model's vocab_size "
                    f"({vocab_size}), found {stop}: correct generation_config.json or config.json"
                )
    if template := chat_template_of(directory):
        try:
            template.render([{"role": "user", "content": "1 + 1 ="}])
        except ValueError as error:
            raise ModelError(f"{directory}: {error}. Fix or delete it") from error


def vocab_size_of(directory: Path) -> int | None:
    size: int | None = _read_json(directory / "config.json").get("vocab_size")
    return size


def chat_template_of(directory: Path) -> ChatTemplate | None:
    """Return the tokenizer's `default` chat template, and `tool_use` for those with tools."""
    settings = _read_json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    templates = file.read_text() if file.is_file() else settings.get("chat_template")
    by_name: dict[str, str] = {}
    if isinstance(templates, list):
        by_name = {each["name"]: each["template"] for each in templates}
    for extra in directory.glob(_MORE_TEMPLATES):
        by_name[extra.stem] = extra.read_text()
    if isinstance(templates, list):
        templates = by_name.get("default")
    if not templates:
        return None
    named = {**_read_json(directory / "special_tokens_map.json"), **settings}
    special_tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    return ChatTemplate(templates, special_tokens, by_name.get("tool_use", ""))


def copy_model_description(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)


def tokenizer_of(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ModelError(
            f"{file} is missing or damaged ({error}): restore it from a copy; each checkpoint of "
            "a run has one"
        ) from None


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that no chat template rendered.

    They begin, once, with the special tokens that the tokenizer puts before a text, such as Llama's
    `<|begin_of_text|>`. Those that it puts after a text are left out, since the policy continues.
    """
    encoded = tokenizer.encode(text)
    is_text = [not special for special in encoded.special_tokens_mask]
    num_special = is_text.index(True) if any(is_text) else 0
    prefix = encoded.ids[:num_special]
    tokens = [token for token, kept in zip(encoded.ids, is_text, strict=True) if kept]
    return tokens if tokens[:num_special] == prefix else prefix + tokens


def texts_of(tokenizer: Tokenizer, sequences: Sequence[Tokens]) -> list[str]:
    """Return the text of each sequence, without special tokens.

    They are decoded in batches: a tokenizer takes Python integers, nine times as large as tokens.
    """
    batches = np.cumsum([len(tokens) for tokens in sequences]) // TOKENS_AT_ONCE
    by_batch = groupby(zip(batches, sequences, strict=True), key=itemgetter(0))
    texts: list[str] = []
    for _, batch in by_batch:
        texts += tokenizer.decode_batch([tokens.tolist() for _, tokens in batch])
    return texts


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    raise ModelError(f"{directory}: config.json names no eos_token_id")


def check_stop_tokens(directory: Path, token_ids: Sequence[int]) -> None:
    """Refuse stop tokens that the tokenizer does not have."""
    tokenizer = tokenizer_of(directory)
    for token in token_ids:
        if tokenizer.id_to_token(token) is None:
            raise ModelError(
                f"generation.stop.token_ids: expected tokens of the model, found {token}: its "
                f"tokenizer has {tokenizer.get_vocab_size()}"
            )


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file, empty if there is none."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    return content
