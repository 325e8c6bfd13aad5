"""Runs functions as Dask tasks; what becomes of a task that fails is one of our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from dask.utils import funcname, key_split
from distributed import Client, Future, KilledWorker

from areal_flow.errors import ArealFlowError, EngineError


class KillsWorkers(EngineError):
    """The process of each worker that ran the task has ended: it may be the task's own doing."""


async def run_task(
    client: Client,
    function: Callable[..., Any],
    *arguments: Any,
    resource: str,
    num_slots: int = 1,
    what: str = "",
    **options: Any,
) -> Any:
    """Run a function on a worker that has a resource; return its result.

    Args:
        num_slots: how many of the resource it takes; with 0 it runs beside those that have it.
        what: Dask's pages call the task ROLE/WHAT; by default the function's name.
        options: of `Client.submit`.

    Raises:
        ArealFlowError: as raised by the task, or what became of it.
    """
    role = resource.partition("-")[0]  # of a trainer rank
    key = f"{role}/{what or funcname(function)}-{uuid4().hex}"
    options |= {"key": key, "resources": {resource: num_slots}}
    return await result_of(client.submit(function, *arguments, **options))


async def result_of(future: Future) -> Any:
    """Return a task's result, its failure as one of ours.

    Raises:
        ArealFlowError: as raised by the task, or what became of it.
    """
    try:
        return await future
    except ArealFlowError:
        raise
    except KilledWorker as error:
        # It may be of a task whose result this one needs.
        kind = KillsWorkers if error.task == future.key else EngineError
        raise kind(f"each worker that ran {key_split(error.task)} died") from error
    except asyncio.CancelledError:
        if future.cancelled():
            raise EngineError("the task was cancelled on the cluster") from None
        raise
    except Exception as error:
        raise ArealFlowError(f"{type(error).__name__}: {error}") from error


def give_up_at_next_death(scheduler: Any, worker: str) -> bool:
    """Have the tasks that a worker had when it ended fail if the next one that has them ends, too.

    Returns:
        Whether it had any.
    """
    event = scheduler.get_events(worker)[-1][1]
    keys = () if event["expected"] else event["processing-tasks"]
    for task in filter(None, map(scheduler.tasks.get, keys)):
        task.suspicious = max(task.suspicious, scheduler.allowed_failures)
    return bool(keys)
