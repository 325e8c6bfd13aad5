"""Chooses what a recipe leaves open: the engine, and how long a sequence may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.machine import usable_bytes
from areal_flow.rollout.engines.pages import CACHE_SHARE, cached_numbers
from areal_flow.rollout.engines.registry import choose_engine

LEAST = 128
"""Where memory seems to have room for less, it is tried with this many tokens."""


def with_engine(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with its engine by name, so that a resume keeps it, and what to say of it.

    Nothing is said of an engine that is as expected.
    """
    settings = recipe.generation
    chosen = choose_engine(settings)
    named = settings.model_copy(update={"engine": chosen.name})
    recipe = recipe.model_copy(update={"generation": named})
    if settings.device != "cuda" or settings.engine == "vllm":
        return recipe, ""
    means = "" if chosen.name == "vllm" else ", the CPU's and the reference, which is slow on a GPU"
    return recipe, f"generation.engine = {chosen.name!r}{means}: {chosen.reason}"


def with_context_length(recipe: Recipe, model: Path) -> tuple[Recipe, str]:
    """Return the recipe with `generation.max_model_len`, and what set it if it was left open."""
    if recipe.generation.max_model_len:
        return recipe, ""
    from transformers import AutoConfig  # slow, and only where a recipe leaves this open

    config = AutoConfig.from_pretrained(model).get_text_config()
    bounds = room_by_part(recipe, config, memory_bytes=usable_bytes())
    part, length = min(bounds.items(), key=lambda bound: bound[1])
    source = f"generation.max_model_len = {length}, which is what {part} has room for"
    return build_recipe(
        recipe.model_dump(mode="json", exclude_none=True),
        {"generation": {"max_model_len": length}},
        source=source,
        spelling=f"{{}} ({part})",
    ), source


def room_by_part(recipe: Recipe, config: Any, *, memory_bytes: int) -> dict[str, int]:
    """Return how many tokens of one sequence each part of a run has room for.

    vLLM has caches of its own, which need not hold all sequences at their longest. What memory a
    GPU has is not known here.
    """
    generation = recipe.generation
    rooms = {"trainer.tokens_per_micro_batch": recipe.trainer.tokens_per_micro_batch}
    if longest := getattr(config, "max_position_embeddings", None):
        rooms["the model"] = longest
    if generation.kv_cache_tokens:
        rooms["generation.kv_cache_tokens"] = generation.kv_cache_tokens
    elif choose_engine(generation).name == "torch" and generation.device == "cpu":
        num_sequences = generation.max_num_seqs * max(1, recipe.cluster.num_generators)
        token_bytes = cached_numbers(config) * (2 if generation.dtype == "bfloat16" else 4)
        num_tokens = int(CACHE_SHARE * memory_bytes / token_bytes / num_sequences)
        rooms[f"memory for {num_sequences} sequences at a time"] = max(LEAST, num_tokens)
    return rooms
