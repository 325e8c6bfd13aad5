"""Prompts with their completions, tokenised once for supervised fine-tuning.

Each row of a JSONL or Parquet file has the text fields `prompt` and `completion`; the stop token is
appended to the completion.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from areal_flow.errors import PromptError
from areal_flow.prompts.bad_rows import refuse_bad_rows
from areal_flow.prompts.files import read_questions

BATCH_ROWS = 4096


def tokenise_completions(
    path: Path, target: Path, *, tokenizer: Tokenizer, stop_token_id: int, max_tokens: int
) -> int:
    """Write a file's rows as arrays of tokens; return how many rows there are.

    Args:
        target: an .npz of `tokens` (all rows, one after the other) and, by row, `prompt_lengths`
            and `lengths`, in tokens.
        max_tokens: the longest row that training can pack.

    Raises:
        PromptError: naming file, line and field of the first bad rows.
    """
    tokens: list[int] = []
    prompt_lengths: list[int] = []
    lengths: list[int] = []
    known: dict[str, list[int]] = {}
    rows = read_questions(path, question_field="prompt", answer_field="completion")
    bad_rows: list[str] = []
    while read := [*islice(rows, BATCH_ROWS)]:
        bad_rows += [str(row) for row in read if isinstance(row, PromptError)]
        batch = [row for row in read if not isinstance(row, PromptError)]
        _encode([text for row in batch for text in (row.text, row.answer)], known, tokenizer)
        for row in batch:
            prompt, completion = known[row.text], known[row.answer]
            length = len(prompt) + len(completion) + 1
            if not prompt or length > max_tokens:
                bad_rows.append(
                    f"{row.origin}: {len(prompt)} prompt and {length} tokens in all, expected "
                    f"1 or more and at most trainer.tokens_per_micro_batch ({max_tokens})"
                )
            tokens += (*prompt, *completion, stop_token_id)
            prompt_lengths.append(len(prompt))
            lengths.append(length)
    refuse_bad_rows(bad_rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        target,
        tokens=np.array(tokens, np.int32),
        prompt_lengths=np.array(prompt_lengths, np.int32),
        lengths=np.array(lengths, np.int32),
    )
    return len(lengths)


def _encode(texts: list[str], known: dict[str, list[int]], tokenizer: Tokenizer) -> None:
    """Tokenise the texts that are not known yet: a curriculum shows its prompts again and again."""
    new = [text for text in dict.fromkeys(texts) if text not in known]
    encodings = tokenizer.encode_batch(new, add_special_tokens=False)
    known.update((text, encoding.ids) for text, encoding in zip(new, encodings, strict=True))
