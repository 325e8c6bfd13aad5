"""The policy of the job `code`: the default job's, with words of its own.

What one-line functions and their examples are made of is one token each: at most eight write a
formula. No torch, no training, no download.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer

from pipelines.tiny_jobs.functions import HEAD, SHOWN_INPUTS
from pipelines.tiny_jobs.tiny_policy import tokenizer_of_words, write_tiny_model

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
"""A word that begins another one inside comes after it: merges apply in this order."""


def write_coder_model(directory: Path, *, max_model_len: int) -> None:
    write_tiny_model(directory, max_model_len=max_model_len, make_tokenizer=coder_tokenizer)


def coder_tokenizer() -> Tokenizer:
    return tokenizer_of_words(WORDS, pieces=_PIECES)
