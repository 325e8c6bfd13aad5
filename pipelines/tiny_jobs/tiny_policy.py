"""Configuration and tokenizer of the tiny policies, generated: no torch, training or download.

The layers are Qwen2's. The model type is Seed-OSS, which has the same layers, because
`AutoTokenizer` replaces the pre-tokenizer of any model of type Qwen2. The tokenizer is byte-level,
so it encodes any text. A signed term, a running sum and the answer mark are one token each, which
keeps completions short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, END = "<pad>", "<eos>"
LARGEST_TERM = 10
LARGEST_SUM = 120
_PIECES = Regex(r" [+-] \d+| -?\d+|\d| ####| =|[^\d ]+| ")


_ARCHITECTURE = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": None,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
}


def write_tiny_model(
    directory: Path, *, max_model_len: int, make_tokenizer: Callable[[], Tokenizer] | None = None
) -> None:
    """Write config.json, generation_config.json and the tokenizer; weights are drawn later.

    Args:
        make_tokenizer: by default that of the arithmetic recipe.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = (make_tokenizer or build_tokenizer)()
    tokenizer.save(str(directory / "tokenizer.json"))
    stop = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": max_model_len}
    marks = {"eos_token": END, "pad_token": PAD}
    descriptions = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **marks},
        "generation_config.json": stop,
        "config.json": {**_ARCHITECTURE, **sizes, **stop},
    }
    for name, content in descriptions.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def build_tokenizer() -> Tokenizer:
    terms = [f" {sign} {term}" for sign in "+-" for term in range(LARGEST_TERM + 1)]
    sums = [f" {number}" for number in range(-LARGEST_SUM, LARGEST_SUM + 1)]
    return tokenizer_of_words([*terms, *sums, " ####", " ="], pieces=_PIECES)


def tokenizer_of_words(words: Sequence[str], *, pieces: Regex) -> Tokenizer:
    """Return a byte-level BPE tokenizer whose merges follow from `words`, without training.

    Args:
        words: each becomes one token.
        pieces: pre-tokenization; no token spans two pieces.
    """
    vocabulary: dict[str, int] = {}
    for symbol in [PAD, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]:
        vocabulary[symbol] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in words:
        _add_word(word.replace(" ", "Ġ"), vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # It adds nothing, but AutoTokenizer would write it: without it the saved file would change.
    tokenizer.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", [])
    tokenizer.add_special_tokens([PAD, END])
    return tokenizer


def _add_word(word: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Merge left to right, so that every prefix of a word is a token too."""
    merged = word[0]
    for character in word[1:]:
        if merged + character not in vocabulary:
            vocabulary[merged + character] = len(vocabulary)
            merges.append((merged, character))
        merged += character
