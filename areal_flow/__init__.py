"""Fully asynchronous reinforcement learning for reasoning models, as a dataflow.

>>> run = areal_flow.train(prompts=rows, rewards=[my_function], num_steps=20)  # doctest: +SKIP
>>> run.trajectories().groupby("difficulty").reward.mean()  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ImportError as error:
            _refuse_hidden_packages(error)
            raise
    raise AttributeError(f"module 'areal_flow' has no attribute {name!r}")


def _refuse_hidden_packages(cause: ImportError) -> None:
    """Raise a clear error if another module has the name of a package that comes with this one."""
    for package in ("pipelines", "schemas"):
        spec = find_spec(package)
        path = Path(spec.origin) if spec and spec.origin else None
        if path and not path.is_relative_to(Path(__file__).parents[1]):
            raise ImportError(
                f"{path} hides the package {package!r} that is installed with areal-flow, since "
                "Python looks in a script's folder first: rename yours, or move the script",
                name=package,
                path=str(path),
            ) from cause
