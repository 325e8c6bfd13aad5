"""Runs functions as Dask tasks; a task that fails raises one of our errors.

`Executions` records which task each process of a reward worker executes. Dask knows which tasks a
dead worker had, but most of them only waited. So each process writes the key of every task that it
begins to its own file, in a folder that workers and driver share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from dask.utils import funcname, key_split
from distributed import Client, Future, KilledWorker
from distributed.client import FutureCancelledError

from areal_flow.core.errors import ArealFlowError, EngineError, RewardError

MAX_COLLATERAL_RETRIES = 20
"""How often a task may lose its worker to other tasks before it is given up, too."""


class WorkersLost(EngineError):
    """Workers that had the task have ended; another of their tasks may be the cause."""


class KillsWorkers(RewardError):
    """Two reward workers ended while they executed the task, which is a likely cause."""


async def run_task(
    client: Client,
    function: Callable[..., Any],
    *arguments: Any,
    resource: str,
    num_slots: int = 1,
    key: str = "",
    **options: Any,
) -> Any:
    """Run a function on a worker that has a resource; return its result.

    Args:
        num_slots: how many of the resource it takes; with 0 it runs beside tasks that take it.
        key: by default one that Dask's pages show as ROLE/FUNCTION.
        options: of `Client.submit`.
    """
    role = resource.partition("-")[0]  # of a trainer rank
    key = key or _new_key(role, funcname(function))
    options |= {"key": key, "resources": {resource: num_slots}}
    return await result_of(client.submit(function, *arguments, **options))


async def run_reward_task(
    client: Client,
    executions: Executions,
    function: Callable[..., Any],
    *arguments: Any,
    what: str = "",
    **options: Any,
) -> Any:
    """Run a function on a reward worker; again, while workers end because of other tasks.

    Args:
        what: Dask's pages call the task reward/WHAT; by default the function's name.
    """
    key = _new_key("reward", what or funcname(function))
    for attempt in range(MAX_COLLATERAL_RETRIES):
        options |= {"key": f"{key}-{attempt}", "resource": "reward"}
        try:
            return await run_task(client, function, *arguments, **options)
        except WorkersLost as error:
            if executions.num_ends(key) >= 2:
                raise KillsWorkers(str(error)) from error
    raise EngineError(f"reward workers ended {MAX_COLLATERAL_RETRIES} times over other tasks")


def _new_key(role: str, what: str) -> str:
    return f"{role}/{what}-{uuid4().hex}"


async def result_of(future: Future) -> Any:
    try:
        return await future
    except ArealFlowError:
        raise
    except KilledWorker as error:
        # It may be of a task whose result this one needs.
        kind = WorkersLost if error.task == future.key else EngineError
        raise kind(f"each worker that ran {key_split(error.task)} died") from error
    except FutureCancelledError:
        raise EngineError("the task was cancelled on the cluster") from None
    except Exception as error:
        raise ArealFlowError(f"{type(error).__name__}: {error}") from error


def fail_on_next_worker_death(scheduler: Any, worker: str, executed: str) -> None:
    """Fail the task that a worker executed at its end if the next worker that has it ends, too.

    Args:
        executed: its key; other tasks of that worker count no death.
    """
    event = scheduler.get_events(worker)[-1][1]
    keys = () if event["expected"] else event["processing-tasks"]
    for task in filter(None, map(scheduler.tasks.get, keys)):
        task.suspicious = scheduler.allowed_failures if task.key == executed else 0


@dataclass(frozen=True, slots=True)
class Execution:
    """The last task of one process."""

    key: str = ""
    """Empty while it executes none."""
    num_ended: int = 0
    """Tasks that the process has ended."""


class Executions:
    """The files of all processes of one driver's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, process: str, execution: Execution) -> None:
        (self._folder / process).write_text(f"{execution.num_ended} {execution.key}")

    def last(self, process: str) -> Execution:
        with suppress(OSError, ValueError):
            num_ended, _, key = (self._folder / process).read_text().partition(" ")
            return Execution(key, int(num_ended))
        return Execution()

    def num_ends(self, key: str) -> int:
        """Return how many processes ended while they executed a task.

        Args:
            key: the beginning of its keys; it does not run now.
        """
        processes = list(self._folder.glob("*"))
        return sum(self.last(process.name).key.startswith(key) for process in processes)
