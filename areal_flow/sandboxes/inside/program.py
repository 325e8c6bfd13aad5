"""What a confined process does: run a program, lend its functions, or test those of another.

Descriptors 0 to 2 are the usual ones, 3 is the source. A lender reads calls from 4 and answers on
5. A tester reads its request from 0, sends calls on 5, reads answers from 4, and writes its verdict
to 6.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import json
import os
import site
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from . import plain

SCRIPT, LEND, TEST = "script", "lend", "test"
UNREADABLE, OUT_OF_MEMORY, FAILED = 120, 121, 1
"""Exit codes: the source is not Python; out of memory; uncaught exception."""
SOURCE, CALLS_IN, CALLS_OUT, VERDICT = 3, 4, 5, 6
IMPORTED = (
    "collections", "itertools", "functools", "math", "heapq", "bisect", "json", "sys", "io",
    "operator", "statistics", "random", "copy", "datetime", "re", "string", "typing",
)  # fmt: skip
"""What LiveCodeBench's graders import before a program; of names that several have, the first."""
RECURSION_LIMIT = 50_000
"""Set by the same graders."""
_COMPILE_ERRORS = (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError)
_kept: list[Any] = []
"""Streams from before the fork: closing one would close a descriptor of this process."""


def run(task: Callable[[], Any], *, imports: bool = False) -> None:
    """Run a task and end this process; with `imports` the names of `IMPORTED` are predefined."""
    _open_streams()
    code = FAILED
    try:
        if imports:
            _predefine_imports()
        task()
        code = 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - whatever a program raises ends it
        _write_error(traceback.format_exc(limit=-8))
    finally:
        os._exit(_finish() or code)


def run_source(
    namespace: dict[str, Any] | None = None, *, name: str = "__main__"
) -> dict[str, Any]:
    """Run the source as a module; return its names.

    Args:
        namespace: predefined names.
        name: of the module; by default that of the main program.
    """
    with open(SOURCE, "rb") as file:
        source = file.read()
    if name == "__main__":
        site.setquit()  # `exit` and `quit`, which are missing since Python started without `site`
    try:
        compiled = compile(source, "<program>", "exec", dont_inherit=True)
    except _COMPILE_ERRORS as error:
        _write_error(f"{type(error).__name__}: {error}")
        os._exit(UNREADABLE)
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(namespace or {})
    exec(compiled, module.__dict__)
    return module.__dict__


class Lender:
    """Lends out the functions of a program: its names, and the objects that calls returned."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return as data what a call returns or raises."""
        try:
            function = self._function(call["of"], call["name"])
            args = [plain.decode(value, self._resolve) for value in call["args"]]
            kwargs = {k: plain.decode(value, self._resolve) for k, value in call["kwargs"].items()}
            return {"value": plain.encode(function(*args, **kwargs), self._refer)}
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            return {"raised": [type(error).__name__, str(error)[:400]]}

    def _function(self, of: int | None, name: str) -> Any:
        """Return a method of an object, a function, or a method of the class `Solution`."""
        if of is not None:
            return getattr(self._objects[of], name)
        if name in self._names:
            return self._names[name]
        if "Solution" in self._names:
            return getattr(self._names["Solution"](), name)
        raise NameError(f"name {name!r} is not defined")

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _resolve(self, number: int, _: str) -> Any:
        return self._objects[number]


def lend() -> None:
    """Run the source, report that, and answer calls until no more come."""
    lender = Lender(run_source())
    with open(CALLS_OUT, "w") as out, open(CALLS_IN) as calls:
        print("{}", file=out, flush=True)
        for line in calls:
            print(json.dumps(lender.answer(json.loads(line))), file=out, flush=True)


def _predefine_imports() -> None:
    """Predefine common names of the standard library.

    They become built in rather than names of the program, which could lend those as its own.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)
    modules = {name: importlib.import_module(name) for name in IMPORTED}
    offered = dict(modules)
    for module in modules.values():
        for name in getattr(module, "__all__", dir(module)):
            if not name.startswith("_"):
                offered.setdefault(name, getattr(module, name))
    for name, value in offered.items():
        vars(builtins).setdefault(name, value)


def _open_streams() -> None:
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        open(0, "rb"), encoding="utf-8", errors="surrogateescape"  # noqa: SIM115
    )  # fmt: skip
    sys.stdout = sys.__stdout__ = _writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, line_buffering=True)  # type: ignore[misc]


def _writer(fd: int, *, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = open(fd, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering
    )


def _exit_code(raised: SystemExit) -> int:
    if raised.code is None or isinstance(raised.code, int):
        return (raised.code or 0) & 0xFF
    _write_error(f"{raised.code}")
    return FAILED


def _finish() -> int:
    """Do what Python does at exit: wait for threads, call `atexit` functions, flush."""
    steps: tuple[Callable[[], Any], ...] = (
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
        sys.stdout.flush,
    )
    code = 0
    for step in steps:
        try:
            step()
        except MemoryError:
            code = OUT_OF_MEMORY
        except BaseException:  # noqa: BLE001
            code = FAILED
    return code


def _write_error(text: str) -> None:
    try:
        os.write(2, text.encode(errors="backslashreplace")[-4000:])
    except OSError:
        return
