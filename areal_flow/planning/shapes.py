"""Shapes of well-known models, by name: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_flow.core.errors import ConfigError
from areal_flow.policy.models.huggingface import AutoConfig
from areal_flow.policy.tokenizer.directory import refuse_gguf

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "Qwen2.5-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "Qwen2.5-14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "Qwen2.5-32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1536, 8960, 28, 12, 2, 151_936, False),
    "DeepSeek-R1-Distill-Qwen-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
"""Of Qwen2 models; an instruction-tuned one has its base model's."""


def model_config(model: str) -> Any:
    """Return the configuration of a model directory, a `config.json` or a model known by name."""
    path = Path(model)
    directory = path.parent if path.name == "config.json" else path
    if (directory / "config.json").is_file():
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    refuse_gguf(path)
    shape = _SHAPES.get(path.name.removesuffix("-Instruct"))
    if shape is None:
        raise ConfigError(
            f"model = {model!r}: expected a directory with config.json, or one of "
            f"{', '.join(_SHAPES)}, whose shapes are known; download the model's config.json and "
            "give its directory"
        )
    sizes = dict(zip(_FIELDS, shape, strict=True))
    return AutoConfig.for_model("qwen2", max_position_embeddings=131_072, **sizes)
