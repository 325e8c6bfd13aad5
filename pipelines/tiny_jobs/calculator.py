"""Sums that a policy has in its head and products that it has not, and both ways to answer either.

question    "3+8+5 ="           easy: it can be answered at once
            "347*86 ="          hard: no small policy knows it by heart
call        "<tool>calculator 347*86</tool>", the tool's "<result>29842</result>", " #### 29842"
direct      " #### 16"          the answer at once

In the policy's tokenizer digits come in pairs, each a token, and so is each mark: six tokens call
for a product of three digits by two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer

from areal_flow.config import Recipe
from areal_flow.core.errors import PromptError
from areal_flow.rollout.tools import calculate
from areal_flow.rollout.workflows.tool_use import ToolUse
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words

EASY, HARD = 1, 2
"""The difficulty of a row."""
SKILL_CALL_FRACTION = 0.3
"""Of easy questions before the mixed phase of a warm start; for hard ones all is called there."""
HABIT_CALL_FRACTION = 0.25
"""Of all questions in the mixed phase."""
MIXED_PHASE = 0.12
"""The last part of the warm start's steps."""


def make_calculator(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    of, random = recipe.prompts, Random(recipe.seed)
    easy = [f"{a}+{b}+{c}" for a, b, c in product(range(10), repeat=3)]
    hard = [f"{a}*{b}" for a in range(100, 1000) for b in range(12, 100) if 10**4 <= a * b < 10**5]
    if of.num_held_out > len(easy) or of.num_prompts + of.num_held_out > len(hard):
        raise PromptError(
            f"expected at most {len(easy)} questions to hold out and {len(hard)} in all, found "
            f"prompts.num_held_out = {of.num_held_out} and prompts.num_prompts = {of.num_prompts}"
        )
    random.shuffle(easy)
    random.shuffle(hard)
    num_easy = of.num_held_out // 2
    held_out = [(easy.pop(), EASY) for _ in range(num_easy)]
    held_out += [(hard.pop(), HARD) for _ in range(of.num_held_out - num_easy)]
    num_easy = of.num_prompts // 2
    train = [(random.choice(easy), EASY) for _ in range(num_easy)]
    train += [(expression, HARD) for expression in hard[: of.num_prompts - num_easy]]
    return [*map(_row, train)], [*map(_row, held_out)]


def _row(question: tuple[str, int]) -> dict[str, Any]:
    expression, difficulty = question
    answer = calculate(expression)
    return {"question": f"{expression} =", "answer": answer, "difficulty": difficulty}


def demonstrations(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of a prompt and its completion, a call or a direct answer by chance.

    Calls for all hard questions come first, so that the skill is there; direct answers to them are
    mixed in late, so that the policy has a habit for reinforcement learning to change.
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
    marks, result = ToolUse(), calculate(expression)
    return [
        f"{marks.call_start}calculator {expression}{marks.call_end}",
        marks.result_template.replace("{result}", result),
        *direct(expression),
    ]


def direct(expression: str) -> list[str]:
    return [f" #### {calculate(expression)}"]


def calculator_tokenizer() -> Tokenizer:
    of = ToolUse()
    marks = [f"{of.call_start}calculator ", of.call_end, *of.result_template.split("{result}")]
    marks += [" #### ", " ="]
    numbers = [str(number) for number in range(10)] + [f"{number:02d}" for number in range(100)]
    pieces = "|".join([*map(re.escape, marks), r"\d{1,2}", "."])
    return tokenizer_of_words([*marks, *numbers], pieces=Regex(pieces))
