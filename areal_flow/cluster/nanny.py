"""A placement in, the nanny that keeps its worker process running out. Loopback only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Nanny, Status

from areal_flow.cluster.placement import WorkerPlacement

HOST = "127.0.0.1"
"""A scheduler's port is remote code execution: nothing listens beyond this machine."""

GOING = (Status.closing, Status.closed, Status.closing_gracefully, Status.failed)
ENDED = (Status.closed, Status.failed)


class ReportingNanny(Nanny):
    """A nanny that tells of every end of its process that it was not asked for.

    The scheduler only knows processes that got as far as to register.
    """

    def __init__(self, *arguments: Any, told: Callable[[int | None], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told = told

    async def _on_worker_exit(self, exitcode: int | None) -> None:
        if self.status not in GOING:
            self._told(exitcode)
        await super()._on_worker_exit(exitcode)


def nanny_specification(
    placement: WorkerPlacement, told: Callable[[int | None], None]
) -> dict[str, object]:
    """Return what `SpecCluster` starts for a placement."""
    return {
        "cls": ReportingNanny,
        "options": {
            "nthreads": placement.num_threads,
            "resources": placement.resources,
            "env": placement.environment,
            "memory_limit": 0,
            "host": HOST,
            "dashboard": False,
            "preload": ["areal_flow.cluster.preload"],
            "told": told,
        },
    }
