"""Two arithmetic tasks with tiny policies, and the demonstrations that each policy imitates.

Sums (the default recipe) are those of `chain_sum` of reasoning-gym, number by number, without the
second that its import takes:

question            "4 - 1 + 7 ="        the expression
chain of thought    " 4 3 10 #### 10"    the running sums, then the answer
direct              " #### 12"           a guess without steps, off by at most `GUESS_ERROR`

The calculator task has sums that a small policy can compute at once, and products that it cannot:

question    "3+8+5 ="           easy
            "347*86 ="          hard: no small policy knows it by heart
call        "<tool>calculator 347*86</tool>", the tool's "<result>29842</result>", " #### 29842"
direct      " #### 16"          the answer without a call

Its tokenizer encodes digits in pairs, and each mark as one token: a call for a product of three
digits by two takes six tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, product
from random import Random
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer

from areal_flow.config import Recipe
from areal_flow.core.errors import PromptError
from areal_flow.rollout.tools import calculate
from areal_flow.rollout.workflows.tool_use import ToolUse
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words

SEED_SPACING = 1_000_000_000
"""Item i is drawn with seed + i, so close seeds share items."""

ANSWER_MARK = " ####"
CHAIN_OF_THOUGHT_FRACTION = 0.24
"""Fraction of the rows in the mixed phase of a curriculum; before it, all rows."""
MIXED_PHASE = 0.12
"""Fraction of demonstrations, the last ones, that mix in answers for learning to change."""
GUESS_ERROR = 3
"""A guess is the answer plus an error uniform in [-GUESS_ERROR, GUESS_ERROR]."""
_CURRICULUM_STREAM = 7


def arithmetic_questions(
    *, size: int, seed: int, min_terms: int, max_terms: int, stream: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of `size` distinct sums of one-digit terms; difficulty is the number of terms.

    Args:
        stream: 0 for held-out, 1 for training; they share no items, nor do different run seeds.
    """
    first = (2 * seed + stream) * SEED_SPACING
    seen: set[str] = set()
    while len(seen) < size:
        seen_before = len(seen)
        for item in range(first, first + 2 * size):
            expression, answer, num_terms = _chain_sum(Random(item), min_terms, max_terms)
            if expression in seen:
                continue
            seen.add(expression)
            yield {
                "id": f"chain_sum-{item}",
                "question": f"{expression} =",
                "answer": str(answer),
                "difficulty": num_terms,
            }
            if len(seen) == size:
                return
        if len(seen) == seen_before:
            raise PromptError(
                f"expected {size} distinct sums of {min_terms} to {max_terms} terms, found "
                f"{len(seen)}: raise prompts.num_terms or ask for fewer"
            )
        first += 2 * size


def _chain_sum(random: Random, min_terms: int, max_terms: int) -> tuple[str, int, int]:
    num_terms = random.randint(min_terms, max_terms)
    random.randint(1, 1)  # how many digits: reasoning-gym draws it too
    terms = [random.randint(0, 9) for _ in range(num_terms)]
    signs = [random.choice("+-") for _ in range(num_terms - 1)]
    signed = [f"{sign} {term}" for sign, term in zip(signs, terms[1:], strict=True)]
    value = terms[0] + sum(
        term if sign == "+" else -term for sign, term in zip(signs, terms[1:], strict=True)
    )
    return " ".join([str(terms[0]), *signed]), value, num_terms


def running_sums(question: str) -> list[int]:
    parts = question.removesuffix("=").split()
    signed = [int(parts[0])]
    signed += [int(f"{sign}{term}") for sign, term in pairwise(parts) if sign in ("+", "-")]
    return list(accumulate(signed))


def chain_of_thought_answer(question: str) -> str:
    steps = "".join(f" {value}" for value in running_sums(question))
    return steps + direct_answer(question)


def direct_answer(question: str, *, error: int = 0) -> str:
    return f"{ANSWER_MARK} {running_sums(question)[-1] + error}"


def curriculum(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, str]]:
    """Yield rows: chain-of-thought answers, later also guesses, a habit for learning to change.

    Correct direct answers instead of guesses would teach some policies to answer directly and well.
    Sums with rare running sums are drawn more often: the weight of a question is the mean of
    `frequency ** -0.5` over its running sums.
    """
    sums = [running_sums(question) for question in questions]
    frequency = Counter(value for values in sums for value in values)
    weights = np.array(
        [sum(frequency[value] ** -0.5 for value in values) / len(values) for values in sums]
    )
    cumulative = np.cumsum(weights / weights.sum())
    random = np.random.default_rng([seed, _CURRICULUM_STREAM])

    @cache  # rows repeat many times
    def row_of(index: int, shows_steps: bool, error: int) -> dict[str, str]:
        question = questions[index]
        guess = direct_answer(question, error=error)
        answer = chain_of_thought_answer(question) if shows_steps else guess
        return {"prompt": question, "completion": answer}

    for step in range(num_steps):
        drawn = np.searchsorted(cumulative, random.random(batch_size), side="right")
        is_mixed = step >= num_steps * (1 - MIXED_PHASE)
        fraction = CHAIN_OF_THOUGHT_FRACTION if is_mixed else 1.0
        reasoned = random.random(batch_size) < fraction
        errors = random.integers(-GUESS_ERROR, GUESS_ERROR + 1, batch_size) * ~reasoned
        chosen = np.minimum(drawn, len(sums) - 1)
        yield from map(row_of, chosen.tolist(), reasoned.tolist(), errors.tolist())


EASY, HARD = 1, 2
"""The difficulty of a row."""
SKILL_CALL_FRACTION = 0.3
"""Fraction of easy questions answered by a call before the mixed phase; hard ones always are."""
HABIT_CALL_FRACTION = 0.25
"""Fraction of all questions answered by a call in the mixed phase."""


def make_calculator(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    num_train, num_held_out = recipe.prompts.num_prompts, recipe.prompts.num_held_out
    random = Random(recipe.seed)
    easy = [f"{a}+{b}+{c}" for a, b, c in product(range(10), repeat=3)]
    hard = [f"{a}*{b}" for a in range(100, 1000) for b in range(12, 100) if 10**4 <= a * b < 10**5]
    if num_held_out > len(easy) or num_train + num_held_out > len(hard):
        raise PromptError(
            f"expected at most {len(easy)} questions to hold out and {len(hard)} in all, found "
            f"prompts.num_held_out = {num_held_out} and prompts.num_prompts = {num_train}"
        )
    random.shuffle(easy)
    random.shuffle(hard)
    num_easy = num_held_out // 2
    held_out = [(easy.pop(), EASY) for _ in range(num_easy)]
    held_out += [(hard.pop(), HARD) for _ in range(num_held_out - num_easy)]
    num_easy = num_train // 2
    train = [(random.choice(easy), EASY) for _ in range(num_easy)]
    train += [(expression, HARD) for expression in hard[: num_train - num_easy]]
    return [*map(_calculator_row, train)], [*map(_calculator_row, held_out)]


def _calculator_row(question: tuple[str, int]) -> dict[str, Any]:
    expression, difficulty = question
    answer = calculate(expression)
    return {"question": f"{expression} =", "answer": answer, "difficulty": difficulty}


def demonstrations(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield prompts with completions: calls or direct answers, drawn at random.

    At first every hard question is answered by a call, which teaches the skill; direct answers to
    them are mixed in late, a habit that reinforcement learning has to change.
    """
    random = Random(seed)
    for step in range(num_steps):
        is_mixed = step >= num_steps * (1 - MIXED_PHASE)
        for question in random.choices(questions, k=batch_size):
            expression = question.removesuffix(" =")
            skill = 1.0 if "*" in expression else SKILL_CALL_FRACTION
            is_call = random.random() < (HABIT_CALL_FRACTION if is_mixed else skill)
            completion = called(expression) if is_call else direct(expression)
            yield {"prompt": question, "completion": completion}


def called(expression: str) -> list[str]:
    """Return the turns of an answer that calls the calculator; the second is the tool's."""
    tool, result = ToolUse(), calculate(expression)
    return [
        f"{tool.call_start}calculator {expression}{tool.call_end}",
        tool.result_template.replace("{result}", result),
        *direct(expression),
    ]


def direct(expression: str) -> list[str]:
    return [f" #### {calculate(expression)}"]


def calculator_tokenizer() -> Tokenizer:
    tool = ToolUse()
    marks = [f"{tool.call_start}calculator ", tool.call_end]
    marks += tool.result_template.split("{result}")
    marks += [" #### ", " ="]
    numbers = [str(number) for number in range(10)] + [f"{number:02d}" for number in range(100)]
    pieces = "|".join([*map(re.escape, marks), r"\d{1,2}", "."])
    return tokenizer_of_words([*marks, *numbers], pieces=Regex(pieces))
