"""The choice of an engine, and what is refused before a run starts."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import Recipe, build_recipe, load_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.rollout.engines import registry
from areal_flow.rollout.engines.protocol import (
    OWN_ENGINE_ARGS,
    GenerationSettings,
    VLLMSettings,
)
from areal_flow.rollout.engines.registry import choose_engine, require_installed, require_served
from areal_flow.rollout.engines.vllm import support as vllm_support
from areal_flow.rollout.engines.vllm.support import BUILDS, VERSION, engine_arguments
from pipelines.jobs.prepare import with_engine

ROOT = Path(__file__).parents[2]


def choose(engine: str, device: str = "cpu") -> str:
    return choose_engine(GenerationSettings(engine=engine, device=device)).name


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Devices whose build of vLLM is installed: none, until one is added."""
    devices: set[str] = set()

    def installed_version(device: str) -> str | None:
        return VERSION if device in devices else None

    monkeypatch.setattr(vllm_support, "installed_vllm", installed_version)
    monkeypatch.setattr(registry, "installed_vllm", installed_version)
    return devices


def test_auto_takes_vllm_on_a_gpu_where_its_build_is_installed(installed: set[str]) -> None:
    assert choose("auto", "cuda") == "torch"
    installed.add("cpu")
    assert choose("auto", "cuda") == "torch"
    installed.add("cuda")
    assert choose("auto", "cuda") == "vllm"


def test_same_bits_in_any_company_are_the_torch_engine_s_alone_on_a_cpu(
    installed: set[str],
) -> None:
    installed.update(BUILDS)
    settings = GenerationSettings(engine="vllm", device="cpu", batch_invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant = true: expected the engine 'torch' on"):
        require_installed(settings)
    require_installed(settings.model_copy(update={"device": "cuda"}))


def test_run_keeps_the_engine_that_it_began_with(installed: set[str]) -> None:
    assert with_engine(Recipe())[0].generation.engine == "torch"
    recipe = build_recipe({"generation": {"device": "cuda"}}, source="test")
    begun, notice = with_engine(recipe)
    assert notice.startswith(
        "generation.engine = 'torch', the CPU's and the reference, which is sl"
    )
    installed.add("cuda")
    resumed, _ = with_engine(begun)
    assert resumed == begun
    assert (begun.generation.engine, with_engine(recipe)[0].generation.engine) == ("torch", "vllm")
    named = build_recipe({"generation": {"device": "cuda", "engine": "vllm"}}, source="test")
    assert with_engine(named) == (named, "")


ON_A_GPU = VLLMSettings(
    tensor_parallel_size=4,
    gpu_memory_utilization=0.55,
    quantization="fp8",
    enable_sleep_mode=True,
    enforce_eager=True,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"device": "cuda"},
            {
                "async_scheduling": True,
                "enforce_eager": False,
                "block_size": None,
                "hf_overrides": {"head_dtype": "float32"},
                "tensor_parallel_size": 1,
                "quantization": None,
                "gpu_memory_utilization": 0.9,
                "enable_sleep_mode": False,
            },
        ),
        (
            {"device": "cuda", "batch_invariant": True},
            {"async_scheduling": True, "hf_overrides": {"head_dtype": "model"}},
        ),
        (
            {"device": "cpu"},
            {"async_scheduling": False, "enforce_eager": True, "block_size": 32},
        ),
        (
            {"device": "cuda", "vllm": ON_A_GPU},
            ON_A_GPU.model_dump(exclude={"engine_args"}),
        ),
        (
            {"vllm": {"engine_args": {"speculative_config": {"method": "ngram"}, "seed": 3}}},
            {"speculative_config": {"method": "ngram"}, "seed": 3, "async_scheduling": False},
        ),
        (
            {"device": "cuda", "vllm": {"engine_args": {"speculative_config": NGRAM}}},
            {"speculative_config": NGRAM, "async_scheduling": None},
        ),
        (
            {"dtype": "bfloat16", "max_num_seqs": 77, "max_model_len": 4096},
            {"dtype": "bfloat16", "max_num_seqs": 77, "max_model_len": 4096},
        ),
    ],
    ids=["a GPU", "reproducible", "a CPU", "of vLLM", "any", "speculation", "of every engine"],
)
def test_vllm_arguments_follow_the_recipe_and_the_device(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    chosen = GenerationSettings(**{"engine": "vllm", "max_new_tokens": 8, **settings})
    arguments = engine_arguments(ROOT, chosen)
    assert {name: arguments[name] for name in expected} == expected
    assert (arguments["logprobs_mode"], arguments["enable_prefix_caching"]) == (
        "processed_logprobs",
        True,
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("dtype", "use the setting generation.dtype"),
        ("enforce_eager", "use the setting generation.vllm.enforce_eager"),
        ("logprobs_mode", "leave it out"),
    ],
)
def test_arguments_that_a_run_sets_are_refused_by_name(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args: a run sets {name} itself: {advice}"):
        build_recipe({"generation": {"vllm": {"engine_args": {name: 1}}}}, source="test")


@pytest.mark.parametrize(
    ("speculation", "evaluation", "message"),
    [
        ({"method": "eagle"}, {}, r"speculative_config.method: .*ngram.* found 'eagle'"),
        ({"model": "/some/draft"}, {}, "speculative_config.method: .*found None"),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, {}, "'synthetic' accepts tokens"),
        (NGRAM, {"min_p": 0.1}, r"evaluation.min_p \(0.1\): vLLM does not support it"),
    ],
)
def test_speculation_that_would_not_sample_from_the_policy_is_refused(
    speculation: dict[str, Any], evaluation: dict[str, Any], message: str
) -> None:
    engine_args = {"speculative_config": speculation}
    given = {"generation": {"vllm": {"engine_args": engine_args}}, "evaluation": evaluation}
    with pytest.raises(ConfigError, match=message):
        build_recipe(given, source="test")


@pytest.mark.parametrize(
    ("generation", "rank", "message"),
    [
        ({}, 8, "needs generation.engine = 'vllm', found 'auto'"),
        ({"engine": "torch"}, 8, "is of vLLM alone"),
        ({"engine": "vllm"}, 0, r"adapter of rank 1 to 512, found trainer.lora.rank = 0"),
        ({"engine": "vllm"}, 513, r"found trainer.lora.rank = 513: leave it out, and engines get"),
        (
            {"engine": "vllm", "device": "cuda", "vllm": {"quantization": "fp8"}},
            8,
            "with quantization = 'fp8': leave either out",
        ),
    ],
)
def test_adapters_that_no_engine_would_serve_are_refused(
    generation: dict[str, Any], rank: int, message: str
) -> None:
    vllm = {"engine_args": {"enable_lora": True}, **generation.get("vllm", {})}
    given = {"generation": {**generation, "vllm": vllm}, "trainer": {"lora": {"rank": rank}}}
    with pytest.raises(ConfigError, match=message):
        build_recipe(given, source="test")


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (False, 1)), (1, (True, 1)), (9, (True, 16)), (512, (True, 512))]
)
def test_vllm_has_room_for_an_adapter_of_at_least_its_rank(
    rank: int, expected: tuple[bool, int]
) -> None:
    arguments = engine_arguments(ROOT, GenerationSettings(engine="vllm"), lora_rank=rank)
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == expected


def test_every_argument_that_a_run_sets_has_its_advice() -> None:
    arguments = engine_arguments(ROOT, GenerationSettings(device="cuda"))
    of_core = {"weight_transfer_config", "worker_extension_cls", "kv_cache_memory_bytes"}
    assert set(OWN_ENGINE_ARGS) == set(arguments) - {"enable_lora"} | of_core


def test_vllm_gets_batch_invariant_kernels_if_the_recipe_says_so() -> None:
    settings = [GenerationSettings(device="cuda", batch_invariant=each) for each in (False, True)]
    values = [vllm_support.environment(each)["VLLM_BATCH_INVARIANT"] for each in settings]
    assert values == ["0", "1"]


def test_keys_and_values_of_long_contexts_fit_a_gpu() -> None:
    """All sequences of `deepscaler` at their longest would take 210 GB in bfloat16."""
    settings = load_recipe(ROOT / "pipelines" / "recipes" / "deepscaler.toml").generation
    page_bytes = 64 * 28_672
    assert settings.num_pages(64, room=math.inf) * page_bytes > 200e9
    assert settings.num_pages(64, room=40e9 // page_bytes) * page_bytes <= 40e9
    num_pages = settings.num_pages(64, room=0)
    assert num_pages * 64 > settings.max_model_len, "one sequence must fit, or nothing runs"
    given = settings.model_copy(update={"kv_cache_tokens": 64_000})
    assert given.num_pages(64, room=10) == 1000, "what a recipe says is taken as it is"


def test_auto_takes_torch_on_the_cpu_and_says_why(installed: set[str]) -> None:
    installed.update(BUILDS)
    name, reason = choose_engine(GenerationSettings(engine="auto", device="cpu"))
    assert name == "torch"
    assert "generation.device = 'cuda'" in reason


def test_engine_that_is_named_is_taken(installed: set[str]) -> None:
    installed.update(BUILDS)
    assert choose("torch", "cuda") == "torch"
    assert choose("vllm", "cpu") == "vllm"


@pytest.mark.parametrize(("device", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_vllm_without_the_build_for_its_device_is_refused(
    installed: set[str], device: str, other: str
) -> None:
    settings = GenerationSettings(engine="vllm", device=device)
    installed.add(other)
    with pytest.raises(ConfigError, match=rf"the package {BUILDS[device]}, which is not installed"):
        require_installed(settings)
    installed.add(device)
    require_installed(settings)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"engine": "torch", "vllm": {"quantization": "fp8"}}, r"quantization \(fp8\) is of vLLM"),
        ({"engine": "vllm", "vllm": {"quantization": "fp8"}}, r"needs generation.device = 'cuda'"),
        ({"engine": "auto", "vllm": {"tensor_parallel_size": 2}}, r"parallel_size \(2\) needs gen"),
        ({"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}, r"found 'cpu'"),
    ],
)
def test_setting_of_vllm_that_would_do_nothing_is_refused(
    generation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe({"generation": generation}, source="test")


def test_settings_of_vllm_are_refused_where_auto_takes_torch(installed: set[str]) -> None:
    vllm = VLLMSettings(tensor_parallel_size=2, quantization="fp8")
    settings = GenerationSettings(engine="auto", device="cuda", vllm=vllm)
    with pytest.raises(ConfigError, match=r"vllm.tensor_parallel_size, .* 'torch' \(vLLM is not"):
        require_installed(settings)
    installed.add("cuda")
    require_installed(settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head_dim": 16}, "one of 32, 64, .*, found 16 in"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "one of 32, 64, .*, found 16 in"),
        ({"head_dim": 64, "num_experts": 4}, "a mixture of experts, found one in"),
    ],
)
def test_model_that_vllm_cannot_serve_on_the_cpu_is_refused_for_it_alone(
    tmp_path: Path, config: dict[str, int], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        require_served(GenerationSettings(engine="vllm"), tmp_path)
    require_served(GenerationSettings(engine="torch"), tmp_path)
    require_served(GenerationSettings(engine="vllm", device="cuda"), tmp_path)


def test_model_is_split_by_its_attention_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64, "num_attention_heads": 6}))

    def require_split(num_gpus: int) -> None:
        vllm = VLLMSettings(tensor_parallel_size=num_gpus)
        require_served(GenerationSettings(engine="vllm", device="cuda", vllm=vllm), tmp_path)

    require_split(3)
    with pytest.raises(ConfigError, match=r"size \(4\) must divide the 6 attention heads"):
        require_split(4)


def test_one_version_of_vllm_is_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"{BUILDS['cuda']}=={VERSION}"]
    assert f'"{BUILDS["cpu"]}=={VERSION}"' in (ROOT / "noxfile.py").read_text()
