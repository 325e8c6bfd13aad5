"""The Dask tasks that an episode waits for while it runs: scores and tools' results.

| who                    | waits for                | unblocked by                           |
|------------------------|--------------------------|----------------------------------------|
| an episode             | completions              | its own worker's engine                |
| an episode             | a score, a tool's result | a task on a reward worker              |
| a reward worker's task | its resource             | the task before it, which never waits  |
|                        |                          | for an episode: nothing can deadlock   |

Such a task runs again elsewhere if its worker dies; it is dropped if its episode's worker dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from distributed import get_client

from areal_flow.cluster.results import KillsWorkers, run_reward_task
from areal_flow.cluster.reward_tasks import SCORING_KILLS, judge, set_memory_limit
from areal_flow.cluster.worker_context import worker_context
from areal_flow.core.errors import ArealFlowError, EngineError, RewardError
from areal_flow.core.settings import import_function
from areal_flow.core.types import Prompt, Score, Tokens

MID_EPISODE_PRIORITY = 10
"""Higher than that of tasks that follow a rollout."""
TOOL_KILLS = RewardError(
    "this tool call crashed its worker: the tool ends its process, as os._exit does, or crashes"
)


async def score_completions(
    prompt_and_version: tuple[Prompt, int], completions: Sequence[Tokens]
) -> Sequence[Score]:
    """Score completions of a prompt, of which this policy version sampled the newest tokens."""
    prompt, version = prompt_and_version
    return await judge(worker_context(), [(prompt, tokens, version) for tokens in completions])


def call_tool(path: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function at an import path, each call in a thread; return results or errors."""
    set_memory_limit(worker_context())
    function = import_function(path, setting="a tool", error=ArealFlowError)

    def outcome(arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except ArealFlowError as error:
            return error
        except Exception as error:  # noqa: BLE001 - fails only the member that called
            return ArealFlowError(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(len(calls)) as threads:
        return [*threads.map(outcome, calls)]


RESULT_ON_CRASH: dict[Callable[..., Any], Any] = {
    score_completions: SCORING_KILLS,
    call_tool: TOOL_KILLS,
}
"""The result of an item that kills workers."""


async def on_reward_worker(
    function: Callable[..., Any], what: Any, items: Sequence[Any]
) -> Sequence[Any]:
    """Run a task of several items for an episode; an item that kills workers fails alone."""
    client, executions = get_client(), worker_context().executions
    try:
        results: Sequence[Any] = await run_reward_task(
            client, executions, function, what, items, priority=MID_EPISODE_PRIORITY
        )
        return results
    except KillsWorkers:
        if len(items) == 1:
            return [RESULT_ON_CRASH[function]]
        alone = [await on_reward_worker(function, what, [item]) for item in items]
        return [*chain.from_iterable(alone)]
    except EngineError as error:
        raise RewardError(str(error)) from error
