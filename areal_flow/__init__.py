"""Fully asynchronous reinforcement learning for reasoning models, as a dataflow.

>>> run = areal_flow.open_run("runs/NAME")          # doctest: +SKIP
>>> run.trajectories().groupby("difficulty").reward.mean()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_flow.store.queries import Run, open_run

__version__ = "0.1.0"
__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> Any:
    """Import what is public on first use: `import areal_flow` alone loads no vendor."""
    if name in __all__:
        from areal_flow.store import queries

        return getattr(queries, name)
    raise AttributeError(f"module 'areal_flow' has no attribute {name!r}")
