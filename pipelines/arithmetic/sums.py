"""Procedural sums from reasoning-gym, and the two ways to answer one.

question            "4 - 1 + 7 ="        the expression of the item, as the dataset writes it
chain of thought    " 4 3 10 #### 10"    the running sums, then the answer
direct              " #### 10"           the answer at once
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from areal_flow.errors import PromptError
from areal_flow.prompts.files import Question

SEED_SPACING = 1_000_000_000
"""Item i of a reasoning-gym dataset is drawn with seed + i: close seeds share their items."""

ANSWER_MARK = " ####"


def arithmetic_questions(
    *, size: int, seed: int, min_terms: int, max_terms: int, stream: int
) -> Iterator[Question]:
    """Yield `size` distinct sums of one-digit terms; difficulty is the number of terms.

    Args:
        stream: 0 for held-out, 1 for training: far apart, like different run seeds.

    Raises:
        PromptError: there are not so many distinct sums of so few terms.
    """
    from reasoning_gym import create_dataset

    base = (2 * seed + stream) * SEED_SPACING
    settings = {"min_terms": min_terms, "max_terms": max_terms, "min_digits": 1, "max_digits": 1}
    seen: set[str] = set()
    while len(seen) < size:
        seen_before = len(seen)
        items = create_dataset("chain_sum", size=2 * size, seed=base, **settings)
        for item in items:
            expression = item["metadata"]["expression"]
            if expression in seen:
                continue
            seen.add(expression)
            yield Question(
                question_id=f"chain_sum-{base + item['metadata']['source_index']}",
                text=f"{expression} =",
                answer=item["answer"],
                difficulty=item["metadata"]["num_terms"],
                origin=f"chain_sum, seed {base}, item {item['metadata']['source_index']}",
            )
            if len(seen) == size:
                return
        if len(seen) == seen_before:
            raise PromptError(
                f"expected {size} distinct sums of {min_terms} to {max_terms} terms, found "
                f"{len(seen)}: raise prompts.max_terms or ask for fewer"
            )
        base += 2 * size


def running_sums(question: str) -> list[int]:
    """Return the sums of the first one, two, ... terms of a question's expression."""
    parts = question.removesuffix("=").split()
    signed = [int(parts[0])]
    signed += [int(f"{sign}{term}") for sign, term in pairwise(parts) if sign in ("+", "-")]
    return list(accumulate(signed))


def chain_of_thought_answer(question: str) -> str:
    """Return the running sums, then the answer."""
    sums = running_sums(question)
    steps = "".join(f" {value}" for value in sums)
    return f"{steps}{ANSWER_MARK} {sums[-1]}"


def direct_answer(question: str) -> str:
    """Return the answer at once."""
    return f"{ANSWER_MARK} {running_sums(question)[-1]}"
