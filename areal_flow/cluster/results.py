"""Runs functions as Dask tasks; what becomes of a task that fails is one of our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributed import Client, Future, KilledWorker

from areal_flow.errors import ArealFlowError, EngineError


async def run_task(
    client: Client,
    function: Callable[..., Any],
    *arguments: Any,
    resource: str,
    num_slots: int = 1,
    **options: Any,
) -> Any:
    """Run a function on a worker that has a resource; return its result.

    Args:
        num_slots: how many of the resource it takes; with 0 it runs beside those that have it.
        options: of `Client.submit`.

    Raises:
        ArealFlowError: as raised by the task, or what became of it.
    """
    resources = {resource: num_slots}
    task = client.submit(function, *arguments, pure=False, resources=resources, **options)
    return await result_of(task)


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
        num_deaths = error.allowed_failures + 1
        raise EngineError(f"{num_deaths} workers died while they ran {error.task}") from error
    except asyncio.CancelledError:
        if future.cancelled():
            raise EngineError("the task was cancelled on the cluster") from None
        raise
    except Exception as error:
        raise ArealFlowError(f"{type(error).__name__}: {error}") from error
