"""Runs tests, which are trusted, on functions that another process lends: a hostile one.

What comes from there is plain data. An object that is none stands here as a `Borrowed`, of which
methods can be called; it is equal to itself alone and takes part in no arithmetic or comparison,
since its answers would be the candidate's.
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
"""What a test may import the candidate's names from."""
TESTS = "tests"


_PREDICATES = {"equals"} | {
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith(("is", "starts", "ends"))
}
"""Methods of built-in values that say yes or no; what is built in is never borrowed."""
_SILENT = ("StopIteration", "StopAsyncIteration")
"""Would end a test's `map` early, as if all were well."""


class CandidateError(Exception):
    """The candidate raised what is not built in, or no `Exception`."""


class CandidateGone(BaseException):
    """The candidate's process has ended, or speaks no sense; no test may catch it as a failure."""


class Unsendable(TypeError):
    """A test passes what is no data, such as a function of its own."""


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
        """Return what a call of the other process returns, or raise what it raises."""
        given = {
            "of": of, "name": name,
            "args": [plain.encode(value, self._refer) for value in args],
            "kwargs": {key: plain.encode(value, self._refer) for key, value in kwargs.items()},
        }  # fmt: skip
        self.num_calls += 1
        try:
            print(json.dumps(given), file=self._calls, flush=True)
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
        """Return what calls a function of the other process."""

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
    """Run the source as tests, and give the verdict with the mark that only this process has."""
    first = json.loads(sys.stdin.readline())
    with (
        open(program.CALLS_OUT, "w") as calls,
        open(program.CALLS_IN) as answers,
        open(program.VERDICT, "w") as out,
    ):
        verdict, detail = _verdict(calls, answers, first)
        print(json.dumps([first["nonce"], verdict, detail[-400:]]), file=out, flush=True)


def _verdict(calls: IO[str], answers: IO[str], first: dict[str, Any]) -> tuple[str, str]:
    candidate: Candidate | None = None
    try:
        candidate = Candidate(calls, answers)
        _run_tests(candidate, first)
    except AssertionError:
        outcome = "wrong", traceback.format_exc(limit=-1)
    except MemoryError as error:
        outcome = "memory_limit", f"{error}"
    except BaseException as error:  # noqa: BLE001 - a test is judged, whatever it does
        outcome = "runtime_error", f"{type(error).__name__}: {error}"
    else:
        outcome = ("right", "") if candidate.num_calls else ("bad_reference", "no test calls it")
    if candidate is None or candidate.is_gone:
        return "runtime_error", "the candidate's process has ended"
    if candidate.unsendable:
        return "bad_reference", candidate.unsendable
    return outcome


def _run_tests(candidate: Candidate, first: dict[str, Any]) -> None:
    """Run what the tests are: statements, a `check`, functions `test_*`, cases of `unittest`.

    The candidate lends what the tests borrow, whatever else it offers; never a name that is built
    in, by which it would judge itself.
    """
    entry_point, borrowed = first["entry_point"], first["borrowed"]
    lent = {name: candidate.function(name) for name in borrowed if not hasattr(builtins, name)}
    names: dict[str, Any] = dict(lent)
    if entry_point:
        names["candidate"] = lent[entry_point]
    module = sys.modules[MODULE] = ModuleType(MODULE)
    module.__dict__.update(lent)
    if first["setup"]:
        exec(first["setup"], names)
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
    """Return an exception as built in, if it is one; never one that no test expects."""
    known = None if kind in _SILENT else getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # such as UnicodeDecodeError, which takes more than a message
            return known(message)
    return CandidateError(f"{kind}: {message}")
