"""What a run will ask, as far as a user should see it before it begins, and how hard it was."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from textwrap import indent

from areal_flow.prompts.difficulty import prompt_pass_rates
from areal_flow.prompts.prepare import Prepared
from areal_flow.run.layout import RunLayout
from areal_flow.store.queries import Run
from pipelines.console.tables import Report, Table, printable

_SHOWN_BAD_ROWS = 5
_BANDS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)
"""Pass rates up to which, the bound included, a line of a distribution goes; the last goes to 1."""
_SHOWN_CHARACTERS = 1000
"""Of the beginning and of the end of the first prompt."""


def describe_prompts(prepared: Prepared, layout: RunLayout, notes: Sequence[str] = ()) -> str:
    """Return how many prompts there are, which rows were left out, and the first prompt."""
    counts = f"{prepared.num_train} prompts to train on, {prepared.num_held_out} held out"
    lines = [counts, *notes]
    lines += [
        f"  {num_rows} of {path} may be held out, fewer than num_held_out: a fifth of its rows"
        for path, num_rows in prepared.cut_to.items()
    ]
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


def report_difficulty(run: Run) -> Report:
    rates = prompt_pass_rates(run)
    numbers = Counter(bisect_left(_BANDS, rate) for rate in rates["pass_rate"].to_pylist())
    labels = ["0", *(f"to {bound:g}" for bound in (*_BANDS[1:], 1.0))]
    rows = [{"pass rate": label, "prompts": numbers[place]} for place, label in enumerate(labels)]
    title = f"{run.layout.name}: {len(rates)} prompts by the pass rate of their completions"
    return Report({"run": run.layout.name, "prompts": rates.to_pylist()}, [Table(rows, title)])
