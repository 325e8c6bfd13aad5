"""Adds and removes generators while a run goes on, so that neither side waits for the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from areal_flow.cluster.control import add_to, remove_from
from areal_flow.cluster.pool import WorkerPool
from areal_flow.controller.balance import Balance
from areal_flow.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)


class Autoscaler:
    """Changes the number of generators within its bounds, one change at a time."""

    def __init__(self, pool: WorkerPool, bounds: tuple[int, int] | None) -> None:
        """Take the bounds; without any the number stays."""
        self._pool = pool
        self._balance = Balance(*bounds) if bounds else None
        self._is_changing = False

    def after_step(self, row: Mapping[str, Any]) -> None:
        """Take in a step's row of the ledger; a change is made beside training."""
        number = len(self._pool.registry.expected("generator"))
        is_settled = not self._is_changing and len(self._pool.generators()) == number
        if self._balance is None or not is_settled:
            return
        wanted = self._balance.wanted(row, number=number)
        if wanted != number:
            logger.info("generators: %d -> %d, for balance with the trainer", number, wanted)
            self._is_changing = True
            self._pool.spawn(self._change(self._balance, number, wanted))

    async def _change(self, balance: Balance, number: int, wanted: int) -> None:
        try:
            if wanted > number:
                await add_to(self._pool, "generator", wanted - number)
            for record in self._pool.registry.expected("generator")[wanted:]:
                await remove_from(self._pool, record.name)
        except (ConfigError, EngineError) as error:
            balance.most = number
            logger.warning("no more than %d generators: %s", number, error)
        finally:
            self._is_changing = False
