"""Try the tasks of a folder before a run: their solutions must be rewarded, doing nothing not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from areal_flow.core.errors import ArealFlowError
from areal_flow.core.machine import usable_cores
from areal_flow.sandboxes.harbor import HarborTask, TestResult, task_folders
from areal_flow.sandboxes.registry import SandboxSettings

SOLVED, UNTOUCHED = 1.0, 0.0


@dataclass
class Trial:
    """What the tests of a task give its solution, and an untouched sandbox."""

    task: str
    solution: float | None = None
    nothing: float | None = None
    seconds: float = 0.0
    problem: str = ""
    """Why the task should not be trained on; empty if it may be."""


async def try_tasks(folder: Path, settings: SandboxSettings) -> Sequence[Trial]:
    """Try every task of a folder, as many at once as there are processors.

    Raises:
        TaskError: there is no task.
    """
    turns = asyncio.Semaphore(usable_cores())
    return await asyncio.gather(*(_tried(each, settings, turns) for each in task_folders(folder)))


async def _tried(folder: Path, settings: SandboxSettings, turns: asyncio.Semaphore) -> Trial:
    trial = Trial(folder.resolve().name)
    async with turns:
        began = perf_counter()
        try:
            task = HarborTask(folder)
            untouched = await _judged(task, settings, solve=False)
            trial.nothing = untouched.reward
            solved = await _judged(task, settings, solve=True) if task.has_solution else None
            trial.solution = solved.reward if solved else None
            trial.problem = _problem(solved, untouched)
        except (ArealFlowError, OSError) as error:
            trial.problem = str(error)
        trial.seconds = perf_counter() - began
    return trial


async def _judged(task: HarborTask, base: SandboxSettings, *, solve: bool) -> TestResult:
    async with task.opened(base) as sandbox:
        if solve:
            await task.solve(sandbox)
        return await task.judge(sandbox)


def _problem(solved: TestResult | None, untouched: TestResult) -> str:
    if solved is None:
        return "it has no solution/solve.sh, so that nothing says whether its tests can pass"
    if solved.reward < SOLVED:
        return f"its solution gets {solved.reward:g}, expected {SOLVED:g}: {solved.shown()}"
    if untouched.reward > UNTOUCHED:
        return f"doing nothing gets {untouched.reward:g}, expected {UNTOUCHED:g}"
    return ""
