"""Numbers that are in a file of the episode's sandbox, which no policy can know without looking.

question     "37 in 4821 ?"      the line that begins with 37, of the file 4821
call         "<tool>bash grep ^37 4821</tool>"
result       "<result>37 5926</result>", then " #### 5926"
or           "<result>37 see 52</result>": the number is in the line of 52
guess        " #### 1203"        without a call

The tokenizer encodes digits in pairs, and the marks as one token each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer

from areal_flow.config import Recipe
from areal_flow.core.errors import PromptError
from areal_flow.rollout.workflows.tool_use import ToolUse
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words

KEYS = range(10, 100)
NUMBERS = range(1000, 10000)
"""Names of files, and what is in them."""
NUM_LINES = 12
DIRECT, REFERRED = 1, 2
"""The difficulty of a row: how many lines must be read."""
SEE = " see "
MIXED_PHASE = 0.15
"""Fraction of demonstrations, the last ones, in which guesses are a habit."""
HABIT_CALL_FRACTION = 0.2
"""Fraction of questions answered by calls in the mixed phase; before it, all of them."""


def make_lookups(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    num_train, num_held_out = recipe.prompts.num_prompts, recipe.prompts.num_held_out
    if num_train + num_held_out > (most := len(NUMBERS) * 10):
        raise PromptError(
            f"expected at most {most} questions in all, found prompts.num_prompts = {num_train} "
            f"and prompts.num_held_out = {num_held_out}"
        )
    rows = _rows(Random(recipe.seed))
    held_out = [*islice(rows, num_held_out)]
    return [*islice(rows, num_train)], held_out


def _rows(random: Random) -> Iterator[dict[str, Any]]:
    questions = set[str]()
    while True:
        keys = random.sample(KEYS, NUM_LINES)
        numbers = {key: str(random.choice(NUMBERS)) for key in keys}
        key, other = keys[:2]
        file, difficulty = str(random.choice(NUMBERS)), random.choice((DIRECT, REFERRED))
        if (question := f"{key} in {file} ?") in questions:
            continue
        questions.add(question)
        lines = {k: f"{k} {number}" for k, number in numbers.items()}
        if difficulty == REFERRED:
            lines[key] = f"{key}{SEE}{other}"
        answer = numbers[key if difficulty == DIRECT else other]
        yield {
            "question": question,
            "answer": answer,
            "difficulty": difficulty,
            "files": {file: "".join(f"{lines[k]}\n" for k in sorted(lines))},
        }


def look_ups(
    questions: Sequence[str], *, num_steps: int, batch_size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield prompts with completions: calls with results drawn at random, late also guesses."""
    random = Random(seed)
    for step in range(num_steps):
        is_mixed = step >= num_steps * (1 - MIXED_PHASE)
        for question in random.choices(questions, k=batch_size):
            is_call = not is_mixed or random.random() < HABIT_CALL_FRACTION
            number = random.choice(NUMBERS)
            turns = _calls(question, number, random) if is_call else []
            yield {"prompt": question, "completion": [*turns, f" #### {number}"]}


def _calls(question: str, number: int, random: Random) -> list[str]:
    """Return the turns of one call or two; every other one is the tool's."""
    tool = ToolUse()
    key, file = re.findall(r"\d+", question)
    other = random.choice(KEYS)
    is_direct = random.random() < 0.5
    lines = {key: f" {number}"} if is_direct else {key: f"{SEE}{other}", str(other): f" {number}"}
    return [
        turn
        for searched, rest in lines.items()
        for turn in (
            f"{tool.call_start}bash grep ^{searched} {file}{tool.call_end}",
            tool.result_template.replace("{result}", f"{searched}{rest}"),
        )
    ]


def lookup_tokenizer() -> Tokenizer:
    tool = ToolUse()
    marks = [f"{tool.call_start}bash grep ^", tool.call_end]
    marks += [*tool.result_template.split("{result}"), SEE, " #### ", " in ", " ?"]
    numbers = [str(number) for number in range(10)] + [f"{number:02d}" for number in range(100)]
    pieces = "|".join([*map(re.escape, marks), r"\d{1,2}", "."])
    return tokenizer_of_words([*marks, *numbers], pieces=Regex(pieces))
