"""The project's own rows of GSM8K: questions, answers, and answers of models that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "gsm8k"


def _read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


SAMPLE = _read("sample.jsonl")
"""256 questions with worked answers: the first ones of GSM8K's test set."""
WRONG = [
    (row, each["completion"])
    for each in _read("model_answers.jsonl")
    if not each["is_correct"] and (row := int(each["id"].split("/")[0])) < len(SAMPLE)
]
"""Wrong answers, each with the row that it answers."""
