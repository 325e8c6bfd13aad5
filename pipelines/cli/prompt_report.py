"""What a run will ask, as far as a user should see it before it begins."""

from __future__ import annotations

from textwrap import indent

from areal_flow.layout import RunLayout
from areal_flow.prompts.prepare import Prepared
from pipelines.cli.tables import printable

_SHOWN_BAD_ROWS = 5
_SHOWN_CHARACTERS = 1000
"""Of the beginning and of the end of the first prompt."""


def describe_prompts(prepared: Prepared, layout: RunLayout) -> str:
    """Return how many prompts there are, which rows were left out, and the first prompt."""
    lines = [f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out"]
    if prepared.num_repeated:
        lines.append(f"  {prepared.num_repeated} rows that repeat a held-out prompt are left out")
    if prepared.chosen:
        lines.append(f"  {prepared.chosen}")
    if bad_rows := prepared.bad_rows:
        lines.append(f"  {len(bad_rows)} bad rows skipped, listed in {layout.bad_rows}:")
        lines += [f"  {row}" for row in bad_rows[:_SHOWN_BAD_ROWS]]
    digest, prompt = prepared.chat_template_hash[:12], printable(prepared.first_prompt)
    by = f" by the chat template {digest} ({layout.chat_template})" if digest else ""
    if (num_left_out := len(prompt) - 2 * _SHOWN_CHARACTERS) > 0:
        ends = prompt[:_SHOWN_CHARACTERS], prompt[-_SHOWN_CHARACTERS:]
        prompt = f" … {num_left_out} characters more … ".join(ends)
    return "\n".join([*lines, f"The first prompt{by}:", indent(prompt, "  ")])
