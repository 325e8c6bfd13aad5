"""Which engine a recipe gets, and what is refused before anything starts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import build_recipe
from areal_flow.errors import ConfigError
from areal_flow.generation import registry
from areal_flow.generation.protocol import GenerationSettings, VLLMSettings
from areal_flow.generation.registry import choose_engine, require_installed, require_served
from areal_flow.generation.vllm import support as vllm_support
from areal_flow.generation.vllm.support import BUILDS, VERSION

ROOT = Path(__file__).parents[2]


def choose(engine: str, device: str = "cpu") -> str:
    return choose_engine(GenerationSettings(engine=engine, device=device)).name


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Devices whose build of vLLM is installed: none, until one is added."""
    devices: set[str] = set()

    def found(device: str) -> str | None:
        return VERSION if device in devices else None

    monkeypatch.setattr(vllm_support, "installed_vllm", found)
    monkeypatch.setattr(registry, "installed_vllm", found)
    return devices


def test_auto_takes_vllm_on_a_gpu_where_its_build_is_installed(installed: set[str]) -> None:
    assert choose("auto", "cuda") == "torch"
    installed.add("cpu")
    assert choose("auto", "cuda") == "torch"
    installed.add("cuda")
    assert choose("auto", "cuda") == "vllm"


def test_same_bits_in_any_company_are_the_torch_engine_s_alone(installed: set[str]) -> None:
    installed.update(BUILDS)
    settings = GenerationSettings(engine="auto", device="cuda", batch_invariant=True)
    assert choose_engine(settings).name == "torch"
    with pytest.raises(ConfigError, match="batch_invariant = true: expected the engine 'torch'"):
        require_installed(settings.model_copy(update={"engine": "vllm"}))


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
    ("generation", "said"),
    [
        ({"engine": "torch", "vllm": {"quantization": "fp8"}}, r"quantization \(fp8\) is of vLLM"),
        ({"engine": "vllm", "vllm": {"quantization": "fp8"}}, r"needs generation.device = 'cuda'"),
        ({"engine": "auto", "vllm": {"tensor_parallel_size": 2}}, r"parallel_size \(2\) needs gen"),
        ({"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}, r"found 'cpu'"),
    ],
)
def test_setting_of_vllm_that_would_do_nothing_is_refused(
    generation: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_recipe({"generation": generation}, source="test")


def test_settings_of_vllm_are_refused_where_auto_takes_torch(installed: set[str]) -> None:
    vllm = VLLMSettings(tensor_parallel_size=2, quantization="fp8")
    settings = GenerationSettings(engine="auto", device="cuda", vllm=vllm)
    with pytest.raises(ConfigError, match=r"vllm.tensor_parallel_size, .* 'torch' \(vLLM is not"):
        require_installed(settings)
    installed.add("cuda")
    require_installed(settings)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"head_dim": 16}, "one of 32, 64, .*, found 16 in"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "one of 32, 64, .*, found 16 in"),
        ({"head_dim": 64, "num_experts": 4}, "a mixture of experts, found one in"),
    ],
)
def test_model_that_vllm_cannot_serve_on_the_cpu_is_refused_for_it_alone(
    tmp_path: Path, config: dict[str, int], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
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
