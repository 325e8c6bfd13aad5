"""Adds and removes generators while a run goes on, so that neither side waits for the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from subprocess import PIPE
from typing import Any

from areal_flow.cluster.control import add_to, remove_from
from areal_flow.cluster.launchers.child import last_line
from areal_flow.cluster.pool import WorkerPool
from areal_flow.core.errors import ConfigError, EngineError, RunError
from areal_flow.flow.balance import Balance

logger = logging.getLogger(__name__)

PLANNED_STEPS = 12
"""A plan is calibrated to so many steps with one number of generators."""


class Autoscaler:
    """Changes the number of generators within its bounds.

    Decisions count the generators that have joined. One that waits in a queue delays no decision,
    and is withdrawn when it is no longer needed. A leaving generator finishes its rollouts.
    """

    def __init__(
        self, pool: WorkerPool, bounds: tuple[int, int] | None, *, planner: Sequence[str] = ()
    ) -> None:
        """Take the bounds, without which the number stays, and the command of a planner, if one is
        to choose it: after a step and a number, it prints how many generators there should be by
        the steps from that one on, which had this number."""
        self._pool, self._planner = pool, planner
        steps = {"window_steps": PLANNED_STEPS} if planner else {}
        self._balance = Balance(*bounds, **steps) if bounds else None
        self._is_planning = False

    def after_step(self, row: Mapping[str, Any]) -> None:
        """Take in a step's row of the ledger; a change is made beside training."""
        expected = self._pool.registry.expected("generator")
        joined = [record for record in expected if record.address]
        if self._balance is None or self._is_planning:
            return
        rows = self._balance.window(row, number=len(joined))
        if rows:
            self._is_planning = True
            self._pool.spawn(self._change(self._balance, rows, len(joined)))

    async def _change(
        self, balance: Balance, rows: Sequence[Mapping[str, Any]], number: int
    ) -> None:
        try:
            if self._planner:
                arguments = map(str, (rows[0]["step"], number))
                target = min(await _printed_by(*self._planner, *arguments), balance.max_number)
            else:
                target = balance.target_number(rows, number=number)
            if target != number:
                logger.info("generators: %d -> %d, for balance with the trainer", number, target)
            expected = self._pool.registry.expected("generator")
            expected.sort(key=lambda record: not record.address)
            for record in expected[target:]:
                self._pool.spawn(remove_from(self._pool, record.name, after_tasks=True))
            for _ in range(target - len(expected)):
                self._pool.spawn(self._add(balance, number))
        except RunError as error:
            logger.warning("the number of generators stays: %s", error)
        finally:
            self._is_planning = False

    async def _add(self, balance: Balance, number: int) -> None:
        try:
            await add_to(self._pool, "generator", 1)
        except RunError as error:
            logger.info("%s", error)
        except (ConfigError, EngineError) as error:
            balance.max_number = number
            logger.warning("no more than %d generators: %s", number, error)


async def _printed_by(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RunError(f"the planner failed: {last_line(errors)}")
    return int(output)
