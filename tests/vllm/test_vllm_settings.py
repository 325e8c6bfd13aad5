"""vLLM's settings follow from the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import EngineArgs
from vllm.config import VllmConfig

from areal_flow.core.errors import ConfigError
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.vllm.core import engine_config
from areal_flow.rollout.engines.vllm.support import BLOCK_TOKENS, engine_arguments
from tests.policies import write_model_directory
from tests.vllm.models import SETTINGS


def test_vllm_knows_each_argument_that_it_is_given(tmp_path: Path) -> None:
    arguments = EngineArgs(**engine_arguments(tmp_path, GenerationSettings(device="cuda")))
    assert (arguments.async_scheduling, arguments.enforce_eager) == (True, False)
    assert arguments.kv_cache_memory_bytes is None, "a GPU's is vLLM's own choice"


def test_further_arguments_reach_vllm_and_unknown_ones_are_named(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")

    def config_with(**engine_args: int) -> VllmConfig:
        vllm = SETTINGS.vllm.model_copy(update={"engine_args": engine_args})
        return engine_config(model, SETTINGS.model_copy(update={"vllm": vllm}))

    assert config_with(max_num_batched_tokens=96).scheduler_config.max_num_batched_tokens == 96
    with pytest.raises(ConfigError, match=r"engine_args: vLLM 0\.\d+.* has no max_batched_tokens"):
        config_with(max_batched_tokens=96)


def block_bytes(config: VllmConfig) -> int:
    shape = config.model_config.hf_config
    head_size = shape.hidden_size // shape.num_attention_heads
    return BLOCK_TOKENS * 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size * 4


@pytest.mark.parametrize(("kv_cache_tokens", "num_pages"), [(0, 12), (96, 3), (97, 4)])
def test_memory_of_the_cache_is_that_of_its_tokens_to_the_byte(
    kv_cache_tokens: int, num_pages: int, tmp_path: Path
) -> None:
    model = write_model_directory(tmp_path / "model")
    settings = SETTINGS.model_copy(update={"kv_cache_tokens": kv_cache_tokens})
    config = engine_config(model, settings)
    num_bytes = config.cache_config.kv_cache_memory_bytes
    assert num_bytes == (num_pages + 1) * block_bytes(config)  # vLLM keeps a page for itself


def test_memory_of_the_cache_is_at_most_half_of_the_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model_directory(tmp_path / "model")
    size = block_bytes(engine_config(model, SETTINGS))
    monkeypatch.setattr(
        "areal_flow.rollout.engines.vllm.core.usable_bytes", lambda: 2 * 5 * size + 1
    )
    assert engine_config(model, SETTINGS).cache_config.kv_cache_memory_bytes == (5 + 1) * size
