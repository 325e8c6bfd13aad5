"""The verifier `code`: runs the policy's programs in sandboxes, and compares their answers.

No program of a model runs in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from areal_flow import sandboxes
from areal_flow.core import thinking
from areal_flow.core.types import Score, Verdict
from areal_flow.rewards.code.rows import CodeTask, NoTests, code_task
from areal_flow.rewards.protocol import RewardInput
from areal_flow.sandboxes.inside import plain, program
from areal_flow.sandboxes.pool import SandboxPool
from areal_flow.sandboxes.run import Limits, Outcome, Program, SandboxError

HERE = Path(__file__).parent
SANDBOXES = Path(sandboxes.__file__).parent
DEFAULT = Limits()
MAX_RUNS = 32
_NUMBER = re.compile(r"[-+]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})", re.ASCII)
_MAX_DETAIL = 200


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    detail: str = ""


CORRECT = Judgement("correct")


class CodeReward:
    """1 for a program that passes all tests of its row, else 0."""

    made_of = (HERE / "rows.py", Path(thinking.__file__), *sorted(SANDBOXES.rglob("*.py")))
    """Other code that its verdicts depend on."""

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
        runs = (loop.run_in_executor(self._threads, self._score, item) for item in inputs)
        return await asyncio.gather(*runs)

    def _score(self, item: RewardInput) -> Score:
        try:
            row = {"prompt": item.prompt, **item.metadata}
            task = code_task(row, item.completion, item.prompt)
            no_code = Judgement("parse_error", "no code in the completion")
            judgement = grade(self._pool, task) if task else no_code
        except NoTests as error:
            judgement = Judgement("bad_reference", str(error))
        except SandboxError as error:
            return Score(None, "infrastructure_error", error=str(error))
        return Score(
            float(judgement.verdict == "correct"), judgement.verdict, message=judgement.detail
        )


def grade(pool: SandboxPool, task: CodeTask) -> Judgement:
    """Run a program on its tests; the first failure decides."""
    if not (task.tests or task.test_source):
        return Judgement("bad_reference", "there are no tests")
    judgement = _GRADERS[task.mode](pool, task)
    return Judgement(judgement.verdict, judgement.detail[-_MAX_DETAIL:])


def _grade_stdin(pool: SandboxPool, task: CodeTask) -> Judgement:
    source = _bytes(task.source)
    for number, (stdin, expected) in enumerate(task.tests):
        script = Program(program.SCRIPT, source, _bytes(_lines(stdin)), imports=task.imports)
        (outcome,) = pool.run(lambda script=script: [script])  # type: ignore[misc]
        if (failed := _failure(outcome)) is not None:
            return failed
        if not same_output(outcome.stdout.decode(errors="replace"), _lines(expected)):
            output = outcome.stdout[:60].decode(errors="replace")
            return Judgement("incorrect", f"test {number}: printed {output!r}")
    return CORRECT


def _grade_calls(pool: SandboxPool, task: CodeTask) -> Judgement:
    """Make all calls in one process; if it runs out of processor time, the rest in another.

    A process that exceeded its wall time is not followed by another: it could sleep in every call.
    """
    number = 0
    while number < len(task.tests):
        outcome = _call(pool, task, task.tests[number:])
        failed, begin = _failure(outcome), number
        if failed is not None and outcome.timed_out != "cpu":
            return failed
        _, *answers = outcome.answer.splitlines() or [b""]
        if failed is not None and not outcome.answer.endswith(b"\n"):  # cut within an answer
            answers = answers[:-1]
        for answer, (_, expected) in zip(answers, task.tests[begin:], strict=False):
            judgement = _compare_answer(answer, expected)
            if judgement is not CORRECT:
                return failed or Judgement(judgement.verdict, f"test {number}: {judgement.detail}")
            number += 1
        if failed is not None and number in (begin, len(task.tests)):
            return failed
        if failed is None and number < len(task.tests):
            return Judgement("runtime_error", f"test {number}: the program ended without an answer")
    return CORRECT


def _call(pool: SandboxPool, task: CodeTask, tests: Sequence[tuple[Any, Any]]) -> Outcome:
    calls: list[dict[str, Any]] = [
        {"of": None, "name": task.entry_point, "kwargs": {},
         "args": [plain.encode(value, _refuse) for value in args]}
        for args, _ in tests
    ]  # fmt: skip
    lines = "".join(json.dumps(call) + "\n" for call in calls).encode()
    lender = Program(
        program.LEND, _bytes(task.source), descriptors=(lines, None), imports=task.imports
    )
    (outcome,) = pool.run(lambda: [lender])
    return outcome


def _compare_answer(line: bytes, expected: Any) -> Judgement:
    try:
        answer = plain.parse(line)
        if "raised" in answer:
            kind, message = map(str, answer["raised"])
            verdict: Verdict = "memory_limit" if kind == "MemoryError" else "runtime_error"
            return Judgement(verdict, f"{kind}: {message}")
        actual = plain.canonical(answer["value"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return Judgement("incorrect", f"the answer is not plain data: {error}")
    if actual != plain.canonical(plain.encode(expected, _refuse)):
        return Judgement("incorrect", f"returned {line[:60].decode(errors='replace')}")
    return CORRECT


def _grade_asserts(pool: SandboxPool, task: CodeTask) -> Judgement:
    nonce = secrets.token_hex(16)
    request = {"entry_point": task.entry_point, "setup": task.setup, "borrowed": task.borrowed}
    first_line = json.dumps({"nonce": nonce, **request}) + "\n"

    def programs() -> Sequence[Program]:
        calls_in, calls_out = os.pipe2(os.O_CLOEXEC)
        answers_in, answers_out = os.pipe2(os.O_CLOEXEC)
        return [
            Program(program.LEND, _bytes(task.source), descriptors=(calls_in, answers_out)),
            Program(
                program.TEST,
                _bytes(task.test_source),
                stdin=_bytes(first_line),
                descriptors=(answers_in, calls_out, None),
            ),
        ]

    candidate, tester = pool.run(programs)
    judgement = _verdict(tester.answer, nonce)
    if judgement is not None and judgement.verdict == "correct":
        return CORRECT
    has_ended = judgement is None or judgement.verdict == "runtime_error"
    if has_ended and (failed := _failure(candidate)) is not None and not _was_stopped(candidate):
        return failed
    if judgement is not None:
        return judgement
    return _failure(tester, of_tests=True) or Judgement("runtime_error", "no verdict of the tests")


def _was_stopped(outcome: Outcome) -> bool:
    """Return whether a process was killed because another one of its run had ended."""
    exceeded_limit = outcome.timed_out or outcome.is_output_over
    return outcome.exit_code == -signal.SIGKILL and not exceeded_limit


def _verdict(line: bytes, nonce: str) -> Judgement | None:
    try:
        mark, verdict, detail = plain.parse(line)
    except (ValueError, TypeError):
        return None
    return Judgement(verdict, detail) if secrets.compare_digest(mark, nonce) else None


def _failure(outcome: Outcome, *, of_tests: bool = False) -> Judgement | None:
    if outcome.timed_out:
        kind = "processor" if outcome.timed_out == "cpu" else "wall"
        return Judgement("timeout", f"the limit of {kind} time")
    if outcome.is_output_over:
        return Judgement("output_limit", "too much output")
    errors = outcome.stderr.decode(errors="replace").strip().splitlines()
    detail = errors[-1] if errors else f"exit code {outcome.exit_code}"
    if outcome.exit_code == program.UNREADABLE:
        return Judgement("bad_reference" if of_tests else "parse_error", detail)
    if outcome.exit_code == program.OUT_OF_MEMORY:
        return Judgement("memory_limit", detail)
    return Judgement("runtime_error", detail) if outcome.exit_code else None


def same_output(output: str, expected: str) -> bool:
    """Compare output line by line, ignoring white space at the ends; numbers as numbers."""
    actual, correct = ([line.split() for line in text.strip().splitlines()]
                    for text in (output, expected))  # fmt: skip
    return len(actual) == len(correct) and all(
        len(a) == len(b) and all(map(_same_word, a, b))
        for a, b in zip(actual, correct, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    are_numbers = _NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)
    return bool(are_numbers) and Decimal(word) == Decimal(expected)


def _lines(text: Any) -> str:
    """Return input or output as text; some rows hold a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _refuse(value: Any) -> int:
    raise TypeError(f"expected plain data in a test, found a {type(value).__name__}")


_GRADERS: dict[str, Callable[[SandboxPool, CodeTask], Judgement]] = {
    "stdin": _grade_stdin,
    "call": _grade_calls,
    "assert": _grade_asserts,
}
