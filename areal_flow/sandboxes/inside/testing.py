"""Runs trusted tests on functions that another, hostile process lends.

Results are plain data. Any other object is represented by a `Borrowed`, whose methods can be
called; it is equal to itself alone and supports no arithmetic or comparison, since the candidate
would decide the results.
"""

from __future__ import annotations

import builtins
import inspect
import json
import sys
import traceback
import unittest
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import IO, Any

from . import plain, program

MAX_LINE = 8 * 2**20
MODULE = "solution"
"""The module from which tests may import the candidate's names."""
TESTS = "tests"


_PREDICATES = {"equals"} | {
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith(("is", "starts", "ends"))
}
"""Predicates of built-in types; a built-in value is never borrowed."""
_SILENT = ("StopIteration", "StopAsyncIteration")
"""They would silently end a test's `map` early."""


class CandidateError(Exception):
    """The candidate raised something that is not a built-in `Exception`."""


class CandidateGone(BaseException):
    """The candidate's process has ended or sent invalid data; tests must not catch it."""


class Unsendable(TypeError):
    """A test passes an argument that is not data, such as one of its functions."""


class Candidate:
    """Calls functions of the other process."""

    def __init__(self, calls: IO[str], answers: IO[str]) -> None:
        """Wait until the other process has run its source."""
        self._calls, self._answers = calls, answers
        self.num_calls = 0
        self.is_gone = False
        self.unsendable = ""
        self._next()

    def call(self, of: int | None, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function of the other process; return or raise its result."""
        request = {
            "of": of, "name": name,
            "args": [plain.encode(value, self._refer) for value in args],
            "kwargs": {key: plain.encode(value, self._refer) for key, value in kwargs.items()},
        }  # fmt: skip
        self.num_calls += 1
        try:
            print(json.dumps(request), file=self._calls, flush=True)
        except OSError:
            raise self._gone() from None
        answer = self._next()
        try:
            if "value" in answer:
                return plain.decode(answer["value"], self._resolve)
            kind, message = map(str, answer["raised"])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise self._gone() from None
        raise _exception(kind, message)

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that calls one of the other process."""

        def borrowed(*args: Any, **kwargs: Any) -> Any:
            return self.call(None, name, args, kwargs)

        borrowed.__name__ = borrowed.__qualname__ = name
        return borrowed

    def _next(self) -> Any:
        line = self._answers.readline(MAX_LINE)
        try:
            message = plain.parse(line)
        except ValueError:
            raise self._gone() from None
        if not isinstance(message, dict):
            raise self._gone()
        return message

    def _gone(self) -> CandidateGone:
        self.is_gone = True
        return CandidateGone("the candidate's process has ended, or speaks no sense")

    def _refer(self, value: Any) -> int:
        if isinstance(value, Borrowed) and type(value) is Borrowed:
            return value._number
        self.unsendable = f"a test passes a {type(value).__name__}, which is not data"
        raise Unsendable(self.unsendable)

    def _resolve(self, number: int, kind: str) -> Any:
        return Borrowed(self, number, kind)


class Borrowed:
    """An object of the other process."""

    def __init__(self, candidate: Candidate, number: int, kind: str) -> None:
        self._candidate, self._number, self._kind = candidate, number, kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _PREDICATES:
            raise AttributeError(f"a {self._kind} of the candidate's has no {name!r} here")
        return lambda *args, **kwargs: self._candidate.call(self._number, name, args, kwargs)

    def __bool__(self) -> bool:
        raise TypeError(f"a {self._kind} of the candidate's has no truth value here")

    def __repr__(self) -> str:
        return f"<{self._kind} of the candidate>"


def test() -> None:
    """Run the source as tests; write the verdict with the nonce that only this process knows."""
    request = json.loads(sys.stdin.readline())
    with (
        open(program.CALLS_OUT, "w") as calls,
        open(program.CALLS_IN) as answers,
        open(program.VERDICT, "w") as out,
    ):
        verdict, detail = _verdict(calls, answers, request)
        print(json.dumps([request["nonce"], verdict, detail[-400:]]), file=out, flush=True)


def _verdict(calls: IO[str], answers: IO[str], request: dict[str, Any]) -> tuple[str, str]:
    candidate: Candidate | None = None
    try:
        candidate = Candidate(calls, answers)
        _run_tests(candidate, request)
    except AssertionError:
        outcome = "incorrect", traceback.format_exc(limit=-1)
    except MemoryError as error:
        outcome = "memory_limit", f"{error}"
    except BaseException as error:  # noqa: BLE001 - a test is judged, whatever it does
        outcome = "runtime_error", f"{type(error).__name__}: {error}"
    else:
        outcome = ("correct", "") if candidate.num_calls else ("bad_reference", "no test calls it")
    if candidate is None or candidate.is_gone:
        return "runtime_error", "the candidate's process has ended"
    if candidate.unsendable:
        return "bad_reference", candidate.unsendable
    return outcome


def _run_tests(candidate: Candidate, request: dict[str, Any]) -> None:
    """Run the tests: statements, a `check`, functions `test_*`, cases of `unittest`.

    They get only the names that they borrow from the candidate, and never a built-in name, with
    which the candidate would judge itself.
    """
    entry_point, borrowed = request["entry_point"], request["borrowed"]
    lent = {name: candidate.function(name) for name in borrowed if not hasattr(builtins, name)}
    names: dict[str, Any] = dict(lent)
    if entry_point:
        names["candidate"] = lent[entry_point]
    module = sys.modules[MODULE] = ModuleType(MODULE)
    module.__dict__.update(lent)
    if request["setup"]:
        exec(request["setup"], names)
        names |= lent
    namespace = program.run_source(names, name=TESTS)
    if entry_point and inspect.isfunction(namespace.get("check")):
        namespace["check"](lent[entry_point])
    for name, value in [*namespace.items()]:
        if name.startswith("test_") and inspect.isfunction(value) and value.__module__ == TESTS:
            value()
    _run_cases(sys.modules[TESTS])


def _run_cases(module: ModuleType) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TestResult()
    result.failfast = True
    suite.run(result)
    if result.failures:
        raise AssertionError(result.failures[0][1])
    if result.errors:
        raise RuntimeError(result.errors[0][1])


def _exception(kind: str, message: str) -> Exception:
    """Return a built-in exception of this name, else a `CandidateError`."""
    built_in = None if kind in _SILENT else getattr(builtins, kind, None)
    if isinstance(built_in, type) and issubclass(built_in, Exception):
        with suppress(TypeError):  # such as UnicodeDecodeError, which needs more than a message
            return built_in(message)
    return CandidateError(f"{kind}: {message}")
