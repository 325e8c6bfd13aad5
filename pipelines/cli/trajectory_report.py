"""Prints trajectories: a listing, one of them in full, or all that match into a file.

Tokens are coloured by the policy version that sampled them. Where there are no colours, and where
one version follows another, a mark says which version begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from itertools import groupby
from math import exp
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from areal_flow.layout import RunLayout
from areal_flow.store.browsing import (
    Selection,
    ShownToken,
    ShownTrajectory,
    read_rows,
    select_trajectories,
    show_trajectory,
    stream_rows,
)
from areal_flow.store.queries import Run
from pipelines.cli.table_file import refuse_target, write_table_file
from pipelines.cli.tables import Cell, make_console, one_line, print_facts, print_table, printable

_LISTED = (
    *("trajectory_id", "difficulty", "reward", "num_tokens", "version_spans", "finish_reason"),
    *("status", "step", "reason", "prompt", "completion"),
)
_LABELS = ("#", "trajectory", "diff", "reward", "tokens", "versions", "end", "status")
_COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
_NOT_TRAINED = "dim strike"


def list_trajectories(layout: RunLayout, *, selection: Selection, at: int | None) -> None:
    """Print the selected trajectories, one line each.

    Raises:
        ConfigError: the condition or the order cannot be read.
    """
    with closing(Run(layout.root).database(at=at)) as database:
        identifiers, num_matching = select_trajectories(database, selection)
        extra = [selection.sort] if selection.sort and selection.sort not in _LISTED else []
        rows = read_rows(database, identifiers, [*_LISTED, *extra]).to_pylist()
    console = make_console()
    if not rows:
        console.print(f"no trajectory of {layout.name} matches")
        return
    print_listing(console, rows, extra=extra)
    more = "" if len(rows) == num_matching else "; --limit K for more"
    console.print(
        f"{len(rows)} of {num_matching} that match{more}; --show # or ID for one in full",
        style="dim",
    )


def print_trajectory(
    layout: RunLayout, *, which: str, selection: Selection, at: int | None, by_token: bool
) -> None:
    """Print one trajectory in full.

    Args:
        which: its id, or its number in the listing that `selection` makes.

    Raises:
        ConfigError: the listing is shorter, or cannot be made.
        RunError: there is no such trajectory.
    """
    shown = show_trajectory(Run(layout.root), which, selection=selection, at=at)
    print_page(make_console(), shown, by_token=by_token)


def export_trajectories(
    layout: RunLayout, *, path: Path, selection: Selection, at: int | None
) -> None:
    """Write every selected trajectory, all columns, to a Parquet or JSONL file.

    Raises:
        ConfigError: the condition, the order or the file's name will not do; nothing was written.
    """
    refuse_target(path)
    with closing(Run(layout.root).database(at=at)) as database:
        identifiers, _ = select_trajectories(database, selection)
        schema = read_rows(database, []).schema
        num_rows = write_table_file(path, stream_rows(database, identifiers), schema)
    print(f"{num_rows} trajectories of {layout.name} in {path}")


def print_listing(
    console: Console, rows: Sequence[dict[str, Any]], *, extra: Sequence[str] = ()
) -> None:
    """Print rows, a line each; what is left of a line goes to prompt and completion."""
    texts = ("prompt", "completion")
    cells = [
        [*_listed(number, row), *(_short(row[name]) for name in extra), *(row[n] for n in texts)]
        for number, row in enumerate(rows, start=1)
    ]
    print_table(console, (*_LABELS, *extra, *texts), cells, texts=texts)


def _listed(number: int, row: dict[str, Any]) -> list[Cell]:
    reward, finish, status = row["reward"], row["finish_reason"], row["status"]
    said = {"trained": f"step {row['step']}", "discarded": str(row["reason"])}.get(status, status)
    versions = [str(span["version"]) for span in row["version_spans"]]
    return [
        Text(str(number), "dim"),
        row["trajectory_id"],
        str(row["difficulty"]),
        Text(_short(reward), _reward_style(reward)),
        str(row["num_tokens"]),
        "→".join(versions) if len(versions) < 4 else f"{versions[0]}…{versions[-1]}",
        Text(finish, "yellow" if finish == "length" else ""),
        Text(said, {"discarded": "red", "waiting": "dim"}.get(status, "")),
    ]


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 24)


def _reward_style(reward: float | None) -> str:
    return "yellow" if reward is None else "green" if reward > 0 else "red"


def print_page(console: Console, shown: ShownTrajectory, *, by_token: bool) -> None:
    """Print a trajectory: texts, facts and, on demand, a line a token."""
    row = shown.row
    console.print(
        Text.assemble(
            ("trajectory ", "dim"),
            (row["trajectory_id"], "bold"),
            f" of run {shown.run_name}: member {row['member']} of the {len(shown.group)} in "
            f"group {row['submission_index']}",
        )
    )
    for title, texts in (
        ("prompt", [Text(printable(row["prompt"]))]),
        ("completion", [_completion(shown.tokens), *_legend(shown)]),
    ):
        console.print(Text(f"\n{title}", style="bold"))
        for text in texts:
            console.print(Padding(text, (0, 0, 0, 2), expand=False))
    console.print()
    print_facts(console, _facts(shown))
    if by_token:
        _print_tokens(console, shown.tokens)


def _completion(tokens: Sequence[ShownToken]) -> Text:
    text = Text(overflow="fold")
    several = len({token.version for token in tokens}) > 1
    for version, span in groupby(tokens, key=lambda token: token.version):
        if several:
            text.append(f"⟨v{version}⟩", style=f"{_version_colour(version)} reverse")
        for token in span:
            text.append(printable(token.text), style=_token_style(token))
    return text


def _version_colour(version: int) -> str:
    """Return the colour of a policy version: neighbours differ."""
    return _COLOURS[version % len(_COLOURS)]


def _token_style(token: ShownToken) -> str:
    return _NOT_TRAINED if token.trained is False else _version_colour(token.version)


def _legend(shown: ShownTrajectory) -> list[Text]:
    lines = []
    for version, span in groupby(shown.tokens, key=lambda token: token.version):
        tokens = list(span)
        line = Text("■ ", style=_version_colour(version))
        line.append(f"version {version}: {_count(len(tokens), 'token')}", style="default")
        if tokens[0].staleness is not None:
            line.append(f", staleness {tokens[0].staleness}", style="default")
        if masked := sum(token.trained is False for token in tokens):
            line.append(f", {masked} masked", style=_NOT_TRAINED)
        lines.append(line)
    return lines


def _facts(shown: ShownTrajectory) -> list[tuple[str, Cell]]:
    row = shown.row
    return [
        ("reward", _reward(shown)),
        ("group", _group(shown)),
        ("status", _status(shown)),
        ("advantage", _advantage(shown)),
        ("log-probs", _logprobs(shown.tokens)),
        ("prompt", f"{row['prompt_id']}, difficulty {row['difficulty']}"),
        (
            "generator",
            f"{row['generator']}, attempt {row['attempt']}, seed {row['seed']}, "
            f"driver's writer epoch {row['writer_epoch']}",
        ),
        ("times", _times(shown)),
    ]


def _reward(shown: ShownTrajectory) -> Text:
    row = shown.row
    detail, reward = json.loads(row["reward_detail"]), row["reward"]
    text = Text()
    text.append("none" if reward is None else f"{reward:g}", style=_reward_style(reward))
    text.append(f"  {detail.get('verdict', '')}")
    if extracted := detail.get("extracted"):
        text.append(f", answered {printable(extracted)!r}")
    if shown.answer is not None:
        text.append(f", answer {printable(shown.answer)[-40:]!r}")
    if error := detail.get("error"):
        text.append(f"\n{printable(error)}", style="red")
    text.append(f"  ({row['verifier']})", style="dim")
    return text


def _group(shown: ShownTrajectory) -> Text:
    text = Text("rewards ")
    for identifier, reward in shown.group:
        here = identifier == shown.row["trajectory_id"]
        value = "-" if reward is None else f"{reward:g}"
        text.append(f"[{value}] " if here else f"{value} ", style="bold" if here else "dim")
    return text


def _status(shown: ShownTrajectory) -> str:
    row = shown.row
    match row["status"]:
        case "discarded":
            return f"discarded, known to step {row['step']}: {row['reason']}"
        case "waiting":
            return "waiting: committed, neither trained nor discarded"
    staleness = "-" if row["staleness"] is None else f"{row['staleness']:.2f}"
    return (
        f"trained in step {row['step']}, which started from version {row['policy_version']}: "
        f"{_count(row['num_trained_tokens'], 'token')} trained, {row['num_masked_tokens']} masked "
        f"(max staleness {shown.max_staleness}), mean staleness {staleness}"
    )


def _advantage(shown: ShownTrajectory) -> str:
    batch = shown.batch
    if batch is None:
        return "none: no step trained it"
    return (
        f"{batch.advantage:+.6g} on each trained token ({batch.advantage_rule}, over the "
        f"{batch.num_trajectories} trajectories of the step)"
    )


def _logprobs(tokens: Sequence[ShownToken]) -> str:
    if not tokens:
        return "none: the completion is empty"
    total = sum(token.logprob for token in tokens)
    position, least = min(enumerate(tokens), key=lambda numbered: numbered[1].logprob)
    return (
        f"sum {total:.2f}, mean {total / len(tokens):.2f}; least likely {least.logprob:.2f} at "
        f"token {position}, {printable(least.text)!r}"
    )


def _times(shown: ShownTrajectory) -> str:
    moments: list[tuple[str, datetime]] = [
        (name, shown.row[f"{name}_at"]) for name in ("submitted", "started", "finished", "scored")
    ]
    if shown.batch is not None:
        moments.append(("trained", shown.batch.committed_at))
    began = moments[0][1]
    first = f"submitted {began:%Y-%m-%d %H:%M:%S} UTC"
    later = [f"{name} +{(at - began).total_seconds():.3f} s" for name, at in moments[1:]]
    return ", ".join([first, *later])


def _print_tokens(console: Console, tokens: Sequence[ShownToken]) -> None:
    console.print()
    labels = ("#", "id", "version", "staleness", "log-prob", "prob", "token", "")
    rows = [
        (
            str(position),
            str(token.token_id),
            Text(str(token.version), style=_version_colour(token.version)),
            "-" if token.staleness is None else str(token.staleness),
            f"{token.logprob:.3f}",
            f"{exp(token.logprob):.3f}",
            Text(repr(printable(token.text)), style=_token_style(token)),
            _why_masked(token),
        )
        for position, token in enumerate(tokens)
    ]
    print_table(console, labels, rows)


def _why_masked(token: ShownToken) -> str:
    if not token.chosen:
        return "masked: not the policy's choice"
    return "masked: too old" if token.trained is False else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
