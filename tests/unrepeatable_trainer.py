"""Trainer ranks on a CPU whose replay does not repeat bits, as with a GPU's default kernels."""

from __future__ import annotations

import json
import random
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PATCH = "from tests.unrepeatable_trainer import RankPatch; RankPatch().install()"
RELATIVE_NOISE = 1e-6


def write_patch(folder: Path) -> Path:
    """Return a folder; processes with it on their path perturb what their ranks train."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH)
    return folder


class RankPatch(MetaPathFinder):
    """Patches the ranks' module once it is imported: most processes never import torch."""

    module = "areal_flow.training.rank"

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            _perturb(module)

        loader.exec_module = execute_and_patch
        return spec


def _perturb(rank: Any) -> None:
    exact_step, exact_environment = rank.train_step, rank.numeric_environment

    def noisy_step(backend: Any, *arguments: Any, **keywords: Any) -> Any:
        numbers = exact_step(backend, *arguments, **keywords)
        for parameter in backend.policy.parameters():
            noise = random.SystemRandom().uniform(-RELATIVE_NOISE, RELATIVE_NOISE)
            parameter.data.mul_(1 + noise)
        return numbers

    def noisy_environment(*arguments: Any) -> str:
        return json.dumps({**json.loads(exact_environment(*arguments)), "device": "noisy cpu"})

    rank.train_step, rank.numeric_environment = noisy_step, noisy_environment
