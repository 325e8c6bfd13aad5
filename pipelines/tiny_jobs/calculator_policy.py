"""The policy of the job `calculator`: the default job's, with words of its own.

Digits come in pairs, each a token, and so is each mark: six tokens call for a product of three
digits by two. No torch, no training, no download.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer

from areal_flow.workflows.tool_use import ToolUse
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words, write_tiny_model


def write_calculator_model(directory: Path, *, max_model_len: int) -> None:
    write_tiny_model(directory, max_model_len=max_model_len, make_tokenizer=build_words)


def build_words() -> Tokenizer:
    of = ToolUse()
    marks = [f"{of.call_start}calculator ", of.call_end, *of.result_template.split("{result}")]
    marks += [" #### ", " ="]
    numbers = [str(number) for number in range(10)] + [f"{number:02d}" for number in range(100)]
    pieces = "|".join([*map(re.escape, marks), r"\d{1,2}", "."])
    return tokenizer_of_words([*marks, *numbers], pieces=Regex(pieces))
