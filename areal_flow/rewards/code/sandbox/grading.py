"""Compares the answers of programs; no program of a model runs in this process."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from areal_flow.core.types import Verdict
from areal_flow.rewards.code.sandbox.inside import plain, program
from areal_flow.rewards.code.sandbox.pool import SandboxPool
from areal_flow.rewards.code.sandbox.run import Outcome, Program

Mode = Literal["stdin", "call", "assert"]
_NUMBER = re.compile(r"[-+]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})", re.ASCII)
_MAX_DETAIL = 200


@dataclass(frozen=True, slots=True)
class CodeTask:
    """A program and how it is tested."""

    source: str
    mode: Mode
    tests: Sequence[tuple[Any, Any]] = ()
    """Pairs of input and output, or of arguments and what is returned."""
    test_source: str = ""
    """The tests of the mode `assert`."""
    entry_point: str = ""
    setup: str = ""
    """Trusted, and runs before the tests."""
    borrowed: tuple[str, ...] = ()
    """What tests of the mode `assert` use of the program."""
    imports: bool = False
    """Whether the program finds common names of the standard library without importing them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    detail: str = ""


RIGHT = Judgement("right")


def grade(pool: SandboxPool, task: CodeTask) -> Judgement:
    """Run a program on its tests; the first that it does not pass decides."""
    if not (task.tests or task.test_source):
        return Judgement("bad_reference", "there are no tests")
    judgement = _GRADERS[task.mode](pool, task)
    return Judgement(judgement.verdict, judgement.detail[-_MAX_DETAIL:])


def _grade_stdin(pool: SandboxPool, task: CodeTask) -> Judgement:
    source = _bytes(task.source)
    for number, (given, expected) in enumerate(task.tests):
        script = Program(program.SCRIPT, source, _bytes(_lines(given)), imports=task.imports)
        (outcome,) = pool.run(lambda script=script: [script])  # type: ignore[misc]
        if (failed := _failure(outcome)) is not None:
            return failed
        if not same_output(outcome.stdout.decode(errors="replace"), _lines(expected)):
            output = outcome.stdout[:60].decode(errors="replace")
            return Judgement("wrong", f"test {number}: printed {output!r}")
    return RIGHT


def _grade_calls(pool: SandboxPool, task: CodeTask) -> Judgement:
    """Have one process answer all calls, and another one those that it had no time for.

    A process that slept and did not compute is followed by none: it could sleep at every call.
    """
    number = 0
    while number < len(task.tests):
        outcome = _call(pool, task, task.tests[number:])
        failed, begin = _failure(outcome), number
        if failed is not None and outcome.timed_out != "cpu":
            return failed
        _, *answers = outcome.answer.splitlines() or [b""]
        if failed is not None and not outcome.answer.endswith(b"\n"):  # within an answer
            answers = answers[:-1]
        for answer, (_, expected) in zip(answers, task.tests[begin:], strict=False):
            judgement = _compare_answer(answer, expected)
            if judgement is not RIGHT:
                return failed or Judgement(judgement.verdict, f"test {number}: {judgement.detail}")
            number += 1
        if failed is not None and number in (begin, len(task.tests)):
            return failed
        if failed is None and number < len(task.tests):
            return Judgement("runtime_error", f"test {number}: the program ended without an answer")
    return RIGHT


def _call(pool: SandboxPool, task: CodeTask, tests: Sequence[tuple[Any, Any]]) -> Outcome:
    calls: list[dict[str, Any]] = [
        {"of": None, "name": task.entry_point, "kwargs": {},
         "args": [plain.encode(value, _refuse) for value in args]}
        for args, _ in tests
    ]  # fmt: skip
    lines = "".join(json.dumps(call) + "\n" for call in calls).encode()
    lender = Program(program.LEND, _bytes(task.source), others=(lines, None), imports=task.imports)
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
        return Judgement("wrong", f"the answer is not plain data: {error}")
    if actual != plain.canonical(plain.encode(expected, _refuse)):
        return Judgement("wrong", f"returned {line[:60].decode(errors='replace')}")
    return RIGHT


def _grade_asserts(pool: SandboxPool, task: CodeTask) -> Judgement:
    nonce = secrets.token_hex(16)
    request = {"entry_point": task.entry_point, "setup": task.setup, "borrowed": task.borrowed}
    first = {"nonce": nonce, **request}

    def programs() -> Sequence[Program]:
        calls_in, calls_out = os.pipe2(os.O_CLOEXEC)
        answers_in, answers_out = os.pipe2(os.O_CLOEXEC)
        return [
            Program(program.LEND, _bytes(task.source), others=(calls_in, answers_out)),
            Program(
                program.TEST,
                _bytes(task.test_source),
                stdin=_bytes(json.dumps(first) + "\n"),
                others=(answers_in, calls_out, None),
            ),
        ]

    candidate, tester = pool.run(programs)
    judgement = _verdict(tester.answer, nonce)
    if judgement is not None and judgement.verdict == "right":
        return RIGHT
    is_gone = judgement is None or judgement.verdict == "runtime_error"
    if is_gone and (failed := _failure(candidate)) is not None and not _was_stopped(candidate):
        return failed
    if judgement is not None:
        return judgement
    return _failure(tester, of_tests=True) or Judgement("runtime_error", "no verdict of the tests")


def _was_stopped(outcome: Outcome) -> bool:
    """Return whether a process ended because another one of its run had."""
    is_own = outcome.timed_out or outcome.is_output_over
    return outcome.exit_code == -signal.SIGKILL and not is_own


def _verdict(line: bytes, nonce: str) -> Judgement | None:
    try:
        mark, verdict, detail = plain.parse(line)
    except (ValueError, TypeError):
        return None
    return Judgement(verdict, detail) if secrets.compare_digest(mark, nonce) else None


def _failure(outcome: Outcome, *, of_tests: bool = False) -> Judgement | None:
    if outcome.timed_out:
        what = "processor" if outcome.timed_out == "cpu" else "wall"
        return Judgement("timeout", f"the limit of {what} time")
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
    """Compare what was printed: line by line without white space at ends, numbers as numbers."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()]
                    for text in (output, expected))  # fmt: skip
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    are_numbers = _NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)
    return bool(are_numbers) and Decimal(word) == Decimal(expected)


def _lines(text: Any) -> str:
    """Return what a program reads or prints; some rows have it as a list of lines."""
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
