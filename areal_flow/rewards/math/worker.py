"""A process that does algebra with math-verify; no other module imports that.

It reads requests from standard input, a line of JSON each, and writes replies in the same way. A
fork computes, under limits that the kernel enforces; if one ends the fork, the reply names it.

    python -m areal_flow.rewards.math.worker CPU_S WALL_S MEMORY_BYTES
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from areal_flow.rewards.math.equality import algebraic_elements, is_same

ROUNDING = 12
"""Digits compared if one side is a decimal number and the other is irrational."""
PRECISION = 15
RECYCLED_CALLS = 2000
MAX_REQUEST_BYTES = 4096
"""A pipe transfers a line of this size atomically."""
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""
_RECYCLED, _OUT_OF_MEMORY = 3, 4
_ENDINGS = {
    -signal.SIGPROF: ("timeout", "the limit of processor time"),
    -signal.SIGALRM: ("timeout", "the limit of wall time"),
    -signal.SIGKILL: ("infrastructure_error", "killed"),
    _OUT_OF_MEMORY: ("memory_limit", "the limit of memory"),
}


_WARM_UP = (
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{2x+1}{3}", r"\frac{(4x+2)}{6}"),
    (r"(-\infty, 3] \cup [4, 5)", r"x \le 3"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & x \end{pmatrix}", r"\{1, \frac{\pi}{2}\}"),
    ("y = 2x - 3", "2x - y = 3"),
    (r"\log_2 (x!) + e^{-i}", r"\sin(\theta_1)"),
)
"""Judged before the first fork: the parser builds its grammar lazily, which takes a second."""


class Unreadable(ValueError):
    """A text is not mathematics; `verdict` is that on its answer."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(f"not mathematics that can be read: {text!r:.80}")
        self.verdict = verdict


def main(cpu_s: float, wall_s: float, memory_bytes: int) -> None:
    logging.disable(logging.CRITICAL)
    replies, busy_with = os.dup(1), mmap.mmap(-1, 8)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for answer, reference in _WARM_UP:
        _judge(0, answer, reference)
    gc.freeze()
    _write(replies, {"number": 0})
    while True:
        busy_with[:8] = bytes(8)
        if (pid := os.fork()) == 0:
            with suppress(ValueError, OSError):  # macOS has no such limit
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            _serve(replies, busy_with, cpu_s, wall_s, memory_bytes)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        if number := int.from_bytes(busy_with[:8]):
            verdict, detail = _ENDINGS.get(code, ("runtime_error", f"ended with status {code}"))
            _write(replies, {"number": number, "verdict": verdict, "detail": detail})


def _serve(
    replies: int, busy_with: mmap.mmap, cpu_s: float, wall_s: float, memory_bytes: int
) -> None:
    for _ in range(RECYCLED_CALLS):
        if not (line := os.read(0, MAX_REQUEST_BYTES)):
            os._exit(0)
        request = json.loads(line)
        busy_with[:8] = request["number"].to_bytes(8)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # the signals end the process
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        verdict, detail = _judge(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # sympy turns a MemoryError into "not equal"; the peak memory reveals it
        used_bytes = MAXRSS_BYTES * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if verdict != "correct" and used_bytes > memory_bytes // 2:
            os._exit(_OUT_OF_MEMORY)
        _write(replies, {"number": request["number"], "verdict": verdict, "detail": detail})
        busy_with[:8] = bytes(8)
    os._exit(_RECYCLED)


def _judge(number: int, answer: str | None, reference: str) -> tuple[str, str]:
    try:
        if answer is None:
            for element in algebraic_elements(reference):
                _parsed(element, "bad_reference")
            return "correct", ""
        return ("correct" if is_same(answer, reference, _equal) else "incorrect"), ""
    except Unreadable as error:
        return error.verdict, str(error)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except Exception as error:  # noqa: BLE001 - the answer made algebra fail
        return "runtime_error", f"{type(error).__name__}: {error}"[:200]


def _equal(answer: str, reference: str) -> bool:
    from math_verify import grader

    grader.sympy_numeric_eq = _same_number
    expected, parsed = _parsed(reference, "bad_reference"), _parsed(answer, "parse_error")
    how = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return bool(grader.verify(expected, parsed, **how))


def _same_number(left: Any, right: Any, *_: int) -> bool:
    """Return whether two expressions are the same number; math-verify's own test rounds.

    It takes 1e-16 for 1e-17 at any precision: it ignores small absolute differences, not small
    relative ones.
    """
    from math_verify.grader import Float, MatrixBase, safe_sympy_doit
    from sympy import nsimplify  # type: ignore[import-untyped]

    sides = [safe_sympy_doit(side) for side in (left, right)]
    if all(isinstance(side, MatrixBase) for side in sides):
        pairs = zip(*(side.flat() for side in sides), strict=False)
        return sides[0].shape == sides[1].shape and all(_same_number(*pair) for pair in pairs)
    try:
        exact = [nsimplify(side, rational=True) for side in sides]
        difference = exact[0] - exact[1]
        if difference.is_Rational or difference.free_symbols:
            return bool(difference == 0)
        distance = abs(difference).evalf(PRECISION)
        if any(side.has(Float) for side in sides):
            return bool(distance <= abs(exact[1]).evalf(PRECISION) / 10**ROUNDING)
    except (AttributeError, TypeError, ValueError):
        return False
    return bool(distance._prec == 1)  # zero in all digits computed, relative to the terms


def _parsed(text: str, verdict: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True)
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=config)
    # LaTeX alone: other text would be passed to sympy's `parse_expr`, which evaluates it. And the
    # first match alone, which is the whole text: later ones would be fractions within it.
    expressions = parse(
        rf"\boxed{{{text}}}",
        [latex],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not expressions:
        raise Unreadable(verdict, text)
    return expressions


def _write(fd: int, reply: dict[str, Any]) -> None:
    os.write(fd, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
