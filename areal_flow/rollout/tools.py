"""The tools `calculator` and `python`, which a policy may call; both run on reward workers.

The calculator walks the syntax tree: Python never evaluates an expression, sizes are bounded, and
numbers are fractions, so `0.1 + 0.2` is 0.3. A Python program runs in a sandbox, without state
between calls.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache

from areal_flow.sandboxes.inside import program
from areal_flow.sandboxes.pool import SandboxPool
from areal_flow.sandboxes.run import Outcome, Program

MAX_CHARACTERS = 400
"""Maximum length of an expression."""
MAX_BITS = 2048
"""Maximum size of a numerator or denominator, at every step."""
MAX_DECIMALS = 10
"""Maximum number of decimals in a result."""

_EXPRESSION = re.compile(r"[\d\s.+\-*/%()]*", re.ASCII)
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(text: str) -> str:
    """Compute an arithmetic expression of numbers, parentheses and + - * / // % **."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"expected at most {MAX_CHARACTERS} characters, found {len(text)}")
    try:
        if not _EXPRESSION.fullmatch(expression := text.replace(",", "").strip()):
            raise SyntaxError
        return _as_text(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"expected numbers and + - * / // % ** ( ), found {text[:40]!r}") from None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise SyntaxError


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power with a whole exponent, after checking the size of the result."""
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent.numerator) > MAX_BITS:
        raise ValueError("expected a power with a small whole exponent")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    return value


def _as_text(value: Fraction) -> str:
    """Return a number in decimal, rounded, without trailing zeros."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = str(round(abs(value) * 10**MAX_DECIMALS)).rjust(MAX_DECIMALS + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-MAX_DECIMALS]}.{digits[-MAX_DECIMALS:]}".rstrip("0").rstrip(".")


@cache
def _sandboxes() -> SandboxPool:
    return SandboxPool()


def run_python(text: str) -> str:
    """Run a Python program, with numpy; the answer is what it prints."""
    script = Program(program.SCRIPT, text.encode(errors="replace"))
    (outcome,) = _sandboxes().run(lambda: [script])
    printed = outcome.stdout.decode(errors="replace").strip()
    return "\n".join(filter(None, (printed, _failure(outcome))))


def _failure(outcome: Outcome) -> str:
    if outcome.is_output_over:
        return "Error: the program printed too much"
    if outcome.timed_out:
        return "Error: the program ran too long"
    if outcome.exit_code:
        errors = outcome.stderr.decode(errors="replace").strip()
        return errors or f"Error: the program ended with {outcome.exit_code}"
    return ""
