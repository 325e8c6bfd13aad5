"""What a confined process does: it runs a program, lends out a program's functions, or tests them.

Descriptors 0 to 2 are the usual ones, 3 is the source. A lender answers calls from 4 over 5. A
tester has its first words on 0, calls over 5, hears answers on 4 and gives its verdict over 6.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import os
import site
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

SCRIPT, LEND, TEST = "script", "lend", "test"
UNREADABLE, OUT_OF_MEMORY, FAILED = 120, 121, 1
"""Exit codes: the source is no Python; memory ran out; an exception that nobody caught."""
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
"""Streams of before the fork: closing one of them would close a descriptor of this process."""


def run(task: Callable[[], Any], *, imports: bool = False) -> None:
    """Do what this process is for, and end it; `imports` offers a program what is `IMPORTED`."""
    _open_streams()
    code = FAILED
    try:
        if imports:
            _offer_imports()
        task()
        code = 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - whatever a program raises ends it
        _say(traceback.format_exc(limit=-8))
    finally:
        os._exit(_finish() or code)


def run_source(
    namespace: dict[str, Any] | None = None, *, name: str = "__main__"
) -> dict[str, Any]:
    """Run the source as a module; return its names.

    Args:
        namespace: names that it has from the beginning.
        name: of the module; the main program's by default.
    """
    with open(SOURCE, "rb") as file:
        source = file.read()
    if name == "__main__":
        site.setquit()  # `exit` and `quit`, which Python lacks where it starts without `site`
    try:
        compiled = compile(source, "<program>", "exec", dont_inherit=True)
    except _COMPILE_ERRORS as error:
        _say(f"{type(error).__name__}: {error}")
        os._exit(UNREADABLE)
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(namespace or {})
    exec(compiled, module.__dict__)
    return module.__dict__


def _offer_imports() -> None:
    """Have a program find names without importing them.

    They become built in, and not the program's: those it could lend as functions of its own.
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
    _say(f"{raised.code}")
    return FAILED


def _finish() -> int:
    """Do what Python does at its end: wait for threads, call what waits for the exit, flush."""
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


def _say(text: str) -> None:
    try:
        os.write(2, text.encode(errors="backslashreplace")[-4000:])
    except OSError:
        return
