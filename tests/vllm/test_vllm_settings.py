"""What vLLM is asked for is what a recipe says."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.generation.protocol import GenerationSettings, VLLMSettings
from areal_flow.generation.vllm.core import BLOCK_TOKENS, engine_arguments, engine_config
from tests.policies import write_model_directory
from tests.vllm.models import SETTINGS

ON_GPUS = GenerationSettings(
    engine="vllm",
    device="cuda",
    dtype="bfloat16",
    max_num_seqs=77,
    max_model_len=4096,
    vllm=VLLMSettings(
        tensor_parallel_size=4, gpu_memory_utilization=0.55, quantization="fp8", enforce_eager=True
    ),
)


def test_settings_of_gpus_are_passed_on(tmp_path: Path) -> None:
    asked = engine_arguments(tmp_path, ON_GPUS)
    passed_on = {name: getattr(asked, name) for name in ON_GPUS.vllm.model_dump()}
    assert passed_on == ON_GPUS.vllm.model_dump()
    assert (asked.dtype, asked.max_num_seqs, asked.max_model_len) == ("bfloat16", 77, 4096)


def test_settings_that_a_recipe_leaves_out_are_vllm_s_own_choice(tmp_path: Path) -> None:
    asked = engine_arguments(tmp_path, GenerationSettings(engine="vllm", device="cuda"))
    assert (asked.tensor_parallel_size, asked.quantization, asked.enforce_eager) == (1, None, False)
    assert asked.kv_cache_memory_bytes is None


@pytest.mark.parametrize(("kv_cache_tokens", "num_pages"), [(0, 12), (96, 3), (97, 4)])
def test_memory_of_the_cache_is_that_of_its_tokens_to_the_byte(
    kv_cache_tokens: int, num_pages: int, tmp_path: Path
) -> None:
    model = write_model_directory(tmp_path / "model")
    settings = SETTINGS.model_copy(update={"kv_cache_tokens": kv_cache_tokens})
    config = engine_config(model, settings)
    shape = config.model_config.hf_config
    head_size = shape.hidden_size // shape.num_attention_heads
    of_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size * 4
    found = config.cache_config.kv_cache_memory_bytes
    assert found == (num_pages + 1) * BLOCK_TOKENS * of_token  # vLLM keeps a page for itself
