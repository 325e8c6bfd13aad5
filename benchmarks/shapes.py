"""Shapes of real models, for random weights."""

from __future__ import annotations

QWEN_1_5B = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B, but for its 28 layers."""
