"""One-line functions to write from examples, and the demonstrations that the policy imitates.

question     "f(0) = 1, f(1) = 4, ... f(4) = 13\\n"               its values for five inputs
formula      "def f(x): return x * 3 + 1"                          right for every input
look-up      "def f(x): return {0: 1, 1: 4, 2: 7, ...}[x]"         right for the examples alone

A function is graded on inputs that no question shows, so a look-up never passes. The policy's
tokenizer has one token for each piece of code or example: a formula takes at most eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer

from areal_flow.config import Recipe
from areal_flow.core.errors import PromptError
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words

SHOWN_INPUTS = (0, 1, 2, 3, 4)
HIDDEN_INPUTS = (-8, -3, -1, 5, 6, 7, 11, 20)
FACTORS = range(1, 10)
SUMMANDS = range(-9, 10)
FORMULA_FRACTION, LATE_FORMULA_FRACTION = 0.9, 0.25
"""Fraction of formulas among the demonstrations, and among those of the late phase."""
LATE_PHASE = 0.2
"""Fraction of demonstrations, the last ones."""
HEAD = "def f(x): return"

_TERMS: tuple[tuple[int, str, range, Callable[[int, int], int]], ...] = (
    (0, "x", range(1), lambda x, _: x),
    (1, "x * x", range(1), lambda x, _: x * x),
    (1, "x % {}", range(2, 5), lambda x, n: x % n),
    (1, "x // {}", range(2, 4), lambda x, n: x // n),
    (1, "max(x, {})", range(1, 4), lambda x, n: max(x, n)),
    (1, "min(x, {})", range(1, 4), lambda x, n: min(x, n)),
    (2, "abs(x - {})", range(1, 4), lambda x, n: abs(x - n)),
)
"""Number of operations, source code, constants, and value."""


@dataclass(frozen=True, slots=True)
class OneLiner:
    """A term of x, times a factor, plus a summand; `term` takes x and the constant in it."""

    expression: str
    num_operations: int
    term: Callable[[int, int], int]
    constant: int
    factor: int
    summand: int

    def call(self, x: int) -> int:
        return self.term(x, self.constant) * self.factor + self.summand

    @property
    def question(self) -> str:
        return ", ".join(f"f({x}) = {self.call(x)}" for x in SHOWN_INPUTS) + "\n"

    @property
    def formula(self) -> str:
        return f"{HEAD} {self.expression}"

    @property
    def look_up(self) -> str:
        pairs = ", ".join(f"{x}: {self.call(x)}" for x in SHOWN_INPUTS)
        return f"{HEAD} {{{pairs}}}[x]"


@cache
def all_functions() -> dict[str, OneLiner]:
    """Return every function by its question, the first of those with the same question."""
    functions: dict[str, OneLiner] = {}
    for num_operations, text, constants, term in _TERMS:
        for constant, factor, summand in product(constants, FACTORS, SUMMANDS):
            product_text = f" * {factor}" if factor != 1 else ""
            sum_text = f" {'+' if summand > 0 else '-'} {abs(summand)}" if summand else ""
            function = OneLiner(
                f"{text.format(constant)}{product_text}{sum_text}",
                num_operations + bool(product_text) + bool(sum_text),
                term,
                constant,
                factor,
                summand,
            )
            functions.setdefault(function.question, function)
    return functions


def make_one_liners(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    num_held_out = recipe.prompts.num_held_out
    functions = [*all_functions().values()]
    if (num_rows := recipe.prompts.num_prompts + num_held_out) > len(functions):
        raise PromptError(
            f"expected at most {len(functions)} one-line functions, found {num_rows}: lower "
            "prompts.num_prompts or prompts.num_held_out"
        )
    Random(recipe.seed).shuffle(functions)
    rows = [*map(_row, functions[:num_rows])]
    return rows[num_held_out:], rows[:num_held_out]


def _row(function: OneLiner) -> dict[str, Any]:
    return {
        "id": function.expression,
        "question": function.question,
        "answer": function.expression,
        "difficulty": function.num_operations,
        "mode": "call",
        "entry_point": "f",
        "tests": [{"args": [x], "expected": function.call(x)} for x in HIDDEN_INPUTS],
    }


def formulas_then_look_ups(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, str]]:
    """Yield rows, first mostly formulas, later mostly look-ups: a habit for learning to change."""
    random, functions = Random(seed), all_functions()
    drawn = random.choices(questions, k=num_steps * batch_size)
    for index, question in enumerate(drawn):
        is_late = index >= len(drawn) * (1 - LATE_PHASE)
        fraction = LATE_FORMULA_FRACTION if is_late else FORMULA_FRACTION
        function = functions[question]
        completion = function.formula if random.random() < fraction else function.look_up
        yield {"prompt": question, "completion": completion}


LARGEST_NUMBER = 160
_PIECES = Regex(
    r"def f\(x\): return|(?:, )?f\(\d\) =| (?:abs|max|min)\(x| [+-] \d+| -?\d+| \{\d:|, \d:|\}\[x\]"
    r"| //| [x*%]"
)
WORDS = [
    HEAD,
    *(f", f({x}) =" for x in SHOWN_INPUTS[1:]),
    *(f", {x}:" for x in SHOWN_INPUTS[1:]),
    *(f" {sign} {number}" for sign in "+-" for number in range(1, 10)),
    *(f" {{{SHOWN_INPUTS[0]}:", f"f({SHOWN_INPUTS[0]}) =", "}[x]"),
    *(" abs(x", " max(x", " min(x", " x", " *", " %", " //"),
    *(f" {number}" for number in range(-LARGEST_NUMBER, LARGEST_NUMBER + 1)),
]
"""A word that is a prefix inside another word comes after it: merges apply in this order."""


def coder_tokenizer() -> Tokenizer:
    return tokenizer_of_words(WORDS, pieces=_PIECES)
