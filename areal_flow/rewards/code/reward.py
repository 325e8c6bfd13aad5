"""The verifier `code`: programs of the policy, run in sandboxes on the tests of their rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal_flow.core import thinking
from areal_flow.core.types import Score
from areal_flow.rewards.code.rows import NoTests, code_task
from areal_flow.rewards.code.sandbox.grading import Judgement, grade
from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.code.sandbox.pool import SandboxPool
from areal_flow.rewards.protocol import RewardInput

HERE = Path(__file__).parent
DEFAULT = Limits()
MAX_RUNS = 32


class CodeReward:
    """1 for a program that passes all tests of its row, else 0."""

    made_of = (HERE / "rows.py", Path(thinking.__file__), *sorted((HERE / "sandbox").rglob("*.py")))
    """What else decides its verdicts."""

    def __init__(
        self,
        *,
        cpu_s: float = DEFAULT.cpu_s,
        wall_per_cpu: float = DEFAULT.wall_per_cpu,
        memory_bytes: int = DEFAULT.memory_bytes,
        output_bytes: int = DEFAULT.output_bytes,
        num_threads: int = DEFAULT.num_threads,
    ) -> None:
        self._limits = Limits(
            cpu_s=cpu_s,
            wall_per_cpu=wall_per_cpu,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
            num_threads=num_threads,
        )

    def open(self) -> None:
        self._pool = SandboxPool(self._limits)
        self._threads = ThreadPoolExecutor(MAX_RUNS, thread_name_prefix="sandbox")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._pool.close()

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        loop = asyncio.get_running_loop()
        runs = (loop.run_in_executor(self._threads, self._score, given) for given in inputs)
        return await asyncio.gather(*runs)

    def _score(self, given: RewardInput) -> Score:
        try:
            row = {"prompt": given.prompt, **given.metadata}
            task = code_task(row, given.completion, given.prompt)
            no_code = Judgement("parse_error", "no code in the completion")
            judgement = grade(self._pool, task) if task else no_code
        except NoTests as error:
            judgement = Judgement("bad_reference", str(error))
        except SandboxError as error:
            return Score(None, "infrastructure_error", error=str(error))
        return Score(
            float(judgement.verdict == "right"), judgement.verdict, message=judgement.detail
        )
