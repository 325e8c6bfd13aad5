"""Starts few workers at a time where many would be dropped, or would keep others out."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class StagedStarts:
    """Lets so many workers start at a time at each place.

    A place is what serves a start: a host's sshd, Slurm's controller, Kubernetes' API server.
    """

    def __init__(self, max_starting: int) -> None:
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(max_starting)
        )

    def turn(self, place: str) -> asyncio.Semaphore:
        """Return what a start holds, from its request until it is served."""
        return self._turns[place]
