"""Rows of trajectories in, one table of a terminal's width out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from pipelines.cli.terminal import one_line

LISTED = (
    "trajectory_id",
    "difficulty",
    "reward",
    "num_tokens",
    "version_spans",
    "finish_reason",
    "status",
    "step",
    "reason",
    "prompt",
    "completion",
)
"""The columns that `listing` needs."""

_FEWEST_LETTERS = 12
_MOST_LETTERS = 24


def listing(rows: Sequence[dict[str, Any]], *, width: int, extra: Sequence[str] = ()) -> Table:
    """Return rows as a table of at most `width`; what is left of a line goes to the texts."""
    cells = [_cells(number, row, extra) for number, row in enumerate(rows, start=1)]
    labels = [
        "#",
        "trajectory",
        "diff",
        "reward",
        "tokens",
        "versions",
        "end",
        "status",
        *extra,
    ]
    widths = [max(len(cell) for cell in column) for column in zip(labels, *cells, strict=True)]
    prompt_width, completion_width = _text_widths(rows, width - sum(widths) - len(widths) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for label, fixed in zip(labels, widths, strict=True):
        right = label in ("#", "diff", "reward", "tokens", *extra)
        table.add_column(label, justify="right" if right else "left", no_wrap=True, min_width=fixed)
    table.add_column("prompt", no_wrap=True)
    table.add_column("completion", no_wrap=True)
    for row, plain in zip(rows, cells, strict=True):
        styled = [Text(cell, style) for cell, style in zip(plain, _styles(row, extra), strict=True)]
        table.add_row(
            *styled,
            Text(one_line(row["prompt"], prompt_width)),
            Text(one_line(row["completion"], completion_width)),
        )
    return table


def _text_widths(rows: Sequence[dict[str, Any]], room: int) -> tuple[int, int]:
    """Divide the rest of a line: two fifths are the prompt's, and what the other leaves."""
    room = max(_FEWEST_LETTERS, room)
    prompt, completion = (
        max(len(one_line(row[name], room)) for row in rows) for name in ("prompt", "completion")
    )
    prompt = min(prompt, max(room * 2 // 5, room - completion))
    return max(1, prompt), max(1, room - prompt)


def _cells(number: int, row: dict[str, Any], extra: Sequence[str]) -> list[str]:
    return [
        str(number),
        row["trajectory_id"],
        str(row["difficulty"]),
        _short(row["reward"]),
        str(row["num_tokens"]),
        _versions(row["version_spans"]),
        row["finish_reason"],
        _status(row),
        *(_short(row[name]) for name in extra),
    ]


def _styles(row: dict[str, Any], extra: Sequence[str]) -> list[str]:
    reward = "" if row["reward"] is None else "green" if row["reward"] > 0 else "red"
    finish = "yellow" if row["finish_reason"] == "length" else ""
    status = {"discarded": "red", "waiting": "dim"}.get(row["status"], "")
    return ["dim", "", "", reward, "", "", finish, status, *("" for _ in extra)]


def _versions(spans: Sequence[dict[str, int]]) -> str:
    versions = [str(span["version"]) for span in spans]
    return "→".join(versions) if len(versions) < 4 else f"{versions[0]}…{versions[-1]}"


def _status(row: dict[str, Any]) -> str:
    match row["status"]:
        case "trained":
            return f"step {row['step']}"
        case "discarded":
            return str(row["reason"])
        case _:
            return "waiting"


def _short(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.4g}"
        case _:
            return one_line(str(value), _MOST_LETTERS)
