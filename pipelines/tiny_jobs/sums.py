"""Procedural sums, the two ways to answer one, and which the policy imitates.

They are those of `chain_sum` of reasoning-gym, number by number, without the second that its import
takes.

question            "4 - 1 + 7 ="        the expression
chain of thought    " 4 3 10 #### 10"    the running sums, then the answer
direct              " #### 12"           a guess at once, at most `GUESS_ERROR` off
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import numpy as np

from areal_flow.core.errors import PromptError

SEED_SPACING = 1_000_000_000
"""Item i is drawn with seed + i: close seeds share their items."""

ANSWER_MARK = " ####"
CHAIN_OF_THOUGHT_FRACTION = 0.24
"""Of the rows in the mixed phase of a curriculum; before it, all."""
MIXED_PHASE = 0.12
"""The last part of a curriculum's steps."""
GUESS_ERROR = 3
"""A guess is the answer with an error of at most so much, each as likely."""
_CURRICULUM_STREAM = 7


def arithmetic_questions(
    *, size: int, seed: int, min_terms: int, max_terms: int, stream: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of `size` distinct sums of one-digit terms; difficulty is the number of terms.

    Args:
        stream: 0 for held-out, 1 for training: far apart, like different run seeds.
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
    random.randint(1, 1)  # how many digits: reasoning-gym draws it, too
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
    """Yield rows: chain-of-thought answers, and late also guesses, a habit for learning to change.

    Right answers in place of guesses would teach some policies to answer directly and well. Sums
    with rare running sums are drawn more often: a question's weight is the mean of
    `frequency ** -0.5` over its own.
    """
    sums = [running_sums(question) for question in questions]
    frequency = Counter(value for values in sums for value in values)
    weights = np.array(
        [sum(frequency[value] ** -0.5 for value in values) / len(values) for values in sums]
    )
    cumulative = np.cumsum(weights / weights.sum())
    random = np.random.default_rng([seed, _CURRICULUM_STREAM])

    @cache  # each is shown again and again
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
