"""Fully asynchronous reinforcement learning for reasoning models, as a dataflow.

>>> run = areal_flow.train(prompts=rows, rewards=[my_function], num_steps=20)  # doctest: +SKIP
>>> run.trajectories().groupby("difficulty").reward.mean()  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_flow.core.program import VERSION

if TYPE_CHECKING:
    from pipelines.api import evaluate, report, sft, train
    from pipelines.notebook import Run, open_run

__version__ = VERSION
__all__ = ["Run", "evaluate", "open_run", "report", "sft", "train"]

_HOMES = {
    **dict.fromkeys(("Run", "open_run"), "pipelines.notebook"),
    **dict.fromkeys(("evaluate", "report", "sft", "train"), "pipelines.api"),
}


def __dir__() -> list[str]:
    """Return what is public, which `__getattr__` imports."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import what is public on first use: `import areal_flow` alone loads no vendor."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'areal_flow' has no attribute {name!r}")
