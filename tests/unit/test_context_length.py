"""A context length left open is the minimum of what model, trainer and memory allow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError
from pipelines.jobs.prepare import room_by_part, with_context_length
from tests.policies import write_model_directory

CONFIG = SimpleNamespace(
    num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    hidden_size=1024, max_position_embeddings=40960,
)  # fmt: skip
"""Qwen3-0.6B's."""
GIB = 2**30


def test_memory_holds_the_caches_of_all_generators_in_its_half() -> None:
    recipe = build_recipe(
        {"generation": {"max_num_seqs": 16}, "cluster": {"num_generators": 2}}, source="test"
    )
    rooms = room_by_part(recipe, CONFIG, memory_bytes=64 * GIB)
    token_bytes = 2 * 28 * 8 * 128 * 4
    assert rooms == {
        "trainer.tokens_per_micro_batch": 4096,
        "the model": 40960,
        "memory for 32 sequences at a time": 32 * GIB // token_bytes // 32,
    }
    rooms = room_by_part(recipe, CONFIG, memory_bytes=GIB)
    assert rooms["memory for 32 sequences at a time"] == 128, "it is tried all the same"


def test_cache_of_a_given_size_bounds_instead_of_memory() -> None:
    recipe = build_recipe({"generation": {"kv_cache_tokens": 900}}, source="test")
    rooms = room_by_part(recipe, CONFIG, memory_bytes=GIB)
    assert min(rooms, key=lambda part: rooms[part]) == "generation.kv_cache_tokens"
    assert not any("memory" in part for part in rooms)


def test_memory_of_this_machine_bounds_no_cache_on_a_gpu() -> None:
    table = {"generation": {"engine": "torch", "device": "cuda"}}
    rooms = room_by_part(build_recipe(table, source="test"), CONFIG, memory_bytes=GIB)
    assert not any("memory" in part for part in rooms)


def test_memory_is_what_this_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = write_model_directory(tmp_path / "model"), build_recipe({}, source="test")
    monkeypatch.setattr("pipelines.jobs.prepare.usable_bytes", lambda: 2**28)
    settled, notice = with_context_length(recipe, model)
    config = AutoConfig.from_pretrained(model)
    of_memory = room_by_part(recipe, config, memory_bytes=2**28)
    assert settled.generation.max_model_len == min(of_memory.values()) < 2048
    assert "which is what memory for" in notice


def test_context_length_left_open_is_decided_once_and_a_given_one_is_kept(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")
    settled, notice = with_context_length(build_recipe({}, source="test"), model)
    assert settled.generation.max_model_len == 2048
    assert notice == "generation.max_model_len = 2048, which is what the model has room for"
    assert with_context_length(settled, model) == (settled, "")


def test_completions_that_leave_no_room_for_a_prompt_are_refused(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")
    recipe = build_recipe({"generation": {"max_new_tokens": 2048}}, source="test")
    with pytest.raises(ConfigError, match="leave room for a prompt") as refused:
        with_context_length(recipe, model)
    assert "max_model_len (2048)" in str(refused.value)
