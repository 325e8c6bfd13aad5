"""Turns the failure of a Dask task into one of our errors."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Future, KilledWorker

from areal_flow.errors import ArealFlowError, EngineError


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
        raise EngineError(f"its worker died again and again: {error}") from error
    except asyncio.CancelledError:
        if future.cancelled():
            raise EngineError("the task was cancelled on the cluster") from None
        raise
    except Exception as error:
        raise ArealFlowError(f"{type(error).__name__}: {error}") from error
