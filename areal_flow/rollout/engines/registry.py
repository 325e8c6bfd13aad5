"""The engines: their names in recipes, and their factories, imported only when they are used.

A new engine is a file with a factory, a line here, and a subject in the contract suite.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from areal_flow.core.errors import ConfigError
from areal_flow.core.program import how_to_install
from areal_flow.core.settings import import_function
from areal_flow.rollout.engines.protocol import EngineFactory, GenerationSettings
from areal_flow.rollout.engines.vllm.support import (
    installed_vllm,
    require_vllm,
    require_vllm_serves,
)

ENGINES: dict[str, str] = {
    "torch": "areal_flow.rollout.engines.torch_engine:start_torch_engine",
    "vllm": "areal_flow.rollout.engines.vllm.engine:start_vllm_engine",
}
AUTO = "auto"


class EngineChoice(NamedTuple):
    name: str
    reason: str


def choose_engine(settings: GenerationSettings) -> EngineChoice:
    if settings.engine != AUTO:
        return EngineChoice(settings.engine, f"generation.engine = {settings.engine!r}")
    if settings.device != "cuda":
        return EngineChoice("torch", "'auto' takes vLLM with generation.device = 'cuda' only")
    if not installed_vllm("cuda"):
        return EngineChoice("torch", f"vLLM is not installed: {how_to_install('vllm')}")
    return EngineChoice("vllm", "it is installed, and generation.device = 'cuda'")


def require_engine(name: str) -> None:
    if name not in (AUTO, *ENGINES):
        names = ", ".join([AUTO, *ENGINES])
        raise ConfigError(f"generation.engine = {name!r}: expected one of {names}")


def require_installed(settings: GenerationSettings) -> None:
    name, reason = choose_engine(settings)
    if name == "vllm":
        require_vllm(settings)
    elif chosen := settings.vllm.model_dump(exclude_defaults=True):
        raise ConfigError(
            f"generation.vllm.{', '.join(chosen)}: expected the engine 'vllm', found {name!r} "
            f"({reason}): leave it out, or set generation.engine to 'vllm'"
        )


def require_served(settings: GenerationSettings, model: Path) -> None:
    if choose_engine(settings).name == "vllm":
        require_vllm_serves(model, settings)


def engine_factory(name: str) -> EngineFactory:
    require_engine(name)
    return import_function(ENGINES[name], setting="generation.engine", error=ConfigError)
