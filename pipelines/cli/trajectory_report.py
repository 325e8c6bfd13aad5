"""An inspected trajectory in, a page for the terminal out. No I/O but the printing.

Tokens are coloured by the policy version that sampled them. Where there are no colours, and where
one version follows another, a mark says which version begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from math import exp
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from areal_flow.store.browsing import Inspected, InspectedToken
from pipelines.cli.terminal import printable

_COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
_NOT_TRAINED = "dim strike"


def print_page(console: Console, inspected: Inspected, *, by_token: bool) -> None:
    """Print a trajectory: texts, facts and, on demand, a line a token."""
    row = inspected.row
    console.print(
        Text.assemble(("trajectory ", "dim"), (row["trajectory_id"], "bold"), _origin(inspected))
    )
    console.print(_section("prompt", Text(printable(row["prompt"]))))
    console.print(_section("completion", Group(_completion(inspected.tokens), *_legend(inspected))))
    console.print()
    console.print(_facts(inspected))
    if by_token:
        console.print(Padding(_token_table(inspected), (1, 0, 0, 0)))


def _origin(inspected: Inspected) -> str:
    row = inspected.row
    return (
        f" of run {inspected.run_name}: member {row['member']} of the {len(inspected.group)} in "
        f"group {row['submission_index']}"
    )


def _section(title: str, body: Any) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2)))


def _completion(tokens: Sequence[InspectedToken]) -> Text:
    text = Text(overflow="fold")
    several = len({token.version for token in tokens}) > 1
    for version, span in groupby(tokens, key=lambda token: token.version):
        if several:
            text.append(f"⟨v{version}⟩", style=f"{version_colour(version)} reverse")
        for token in span:
            style = _NOT_TRAINED if token.trained is False else version_colour(version)
            text.append(printable(token.text), style=style)
    return text


def version_colour(version: int) -> str:
    """Return the colour of a policy version: neighbours differ."""
    return _COLOURS[version % len(_COLOURS)]


def _legend(inspected: Inspected) -> list[Text]:
    lines = []
    for version, span in groupby(inspected.tokens, key=lambda token: token.version):
        tokens = list(span)
        line = Text("■ ", style=version_colour(version))
        line.append(f"version {version}: {_count(len(tokens), 'token')}", style="default")
        if tokens[0].staleness is not None:
            line.append(f", staleness {tokens[0].staleness}", style="default")
        if masked := sum(token.trained is False for token in tokens):
            line.append(f", {masked} masked", style=_NOT_TRAINED)
        lines.append(line)
    return lines


def _facts(inspected: Inspected) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, fact in (
        ("reward", _reward(inspected)),
        ("group", _group(inspected)),
        ("status", _status(inspected)),
        ("advantage", _advantage(inspected)),
        ("log-probs", _logprobs(inspected.tokens)),
        ("prompt", f"{inspected.row['prompt_id']}, difficulty {inspected.row['difficulty']}"),
        ("generator", _generator(inspected.row)),
        ("times", _times(inspected)),
    ):
        table.add_row(label, fact)
    return table


def _reward(inspected: Inspected) -> Text:
    row = inspected.row
    detail = json.loads(row["reward_detail"])
    reward = row["reward"]
    style = "yellow" if reward is None else "green" if reward > 0 else "red"
    text = Text("none" if reward is None else f"{reward:g}", style=style)
    text.append(f"  {detail.get('verdict', '')}", style="default")
    if extracted := detail.get("extracted"):
        text.append(f", answered {printable(extracted)!r}", style="default")
    if inspected.answer is not None:
        text.append(f", answer {printable(inspected.answer)[-40:]!r}", style="default")
    if error := detail.get("error"):
        text.append(f"\n{printable(error)}", style="red")
    text.append(f"  ({row['verifier']})", style="dim")
    return text


def _group(inspected: Inspected) -> Text:
    text = Text("rewards ")
    for identifier, reward in inspected.group:
        here = identifier == inspected.row["trajectory_id"]
        shown = "-" if reward is None else f"{reward:g}"
        text.append(f"[{shown}]" if here else shown, style="bold" if here else "dim")
        text.append(" ")
    return text


def _status(inspected: Inspected) -> str:
    row = inspected.row
    match row["status"]:
        case "discarded":
            return f"discarded, known to step {row['step']}: {row['reason']}"
        case "waiting":
            return "waiting: committed, neither trained nor discarded"
    staleness = "-" if row["staleness"] is None else f"{row['staleness']:.2f}"
    return (
        f"trained in step {row['step']}, which started from version {row['policy_version']}: "
        f"{_count(row['num_trained_tokens'], 'token')} trained, {row['num_masked_tokens']} masked "
        f"(max staleness {inspected.max_staleness}), mean staleness {staleness}"
    )


def _advantage(inspected: Inspected) -> str:
    batch = inspected.batch
    if batch is None:
        return "none: no step trained it"
    return (
        f"{batch.advantage:+.6g} on each trained token ({batch.advantage_rule}, over the "
        f"{batch.num_trajectories} trajectories of the step)"
    )


def _logprobs(tokens: Sequence[InspectedToken]) -> str:
    if not tokens:
        return "none: the completion is empty"
    total = sum(token.logprob for token in tokens)
    position, least = min(enumerate(tokens), key=lambda numbered: numbered[1].logprob)
    return (
        f"sum {total:.2f}, mean {total / len(tokens):.2f}; least likely {least.logprob:.2f} at "
        f"token {position}, {printable(least.text)!r}"
    )


def _generator(row: dict[str, Any]) -> str:
    return (
        f"{row['generator']}, attempt {row['attempt']}, seed {row['seed']}, "
        f"driver's writer epoch {row['writer_epoch']}"
    )


def _times(inspected: Inspected) -> str:
    row, batch = inspected.row, inspected.batch
    moments: list[tuple[str, datetime]] = [
        (name, row[f"{name}_at"]) for name in ("submitted", "started", "finished", "scored")
    ]
    if batch is not None:
        moments.append(("trained", batch.committed_at))
    began = moments[0][1]
    first = f"submitted {began:%Y-%m-%d %H:%M:%S} UTC"
    later = [f"{name} +{(at - began).total_seconds():.3f} s" for name, at in moments[1:]]
    return ", ".join([first, *later])


def _token_table(inspected: Inspected) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for label in ("#", "id", "version", "staleness", "log-prob", "prob"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("token", no_wrap=True)
    table.add_column("", no_wrap=True)
    for position, token in enumerate(inspected.tokens):
        style = _NOT_TRAINED if token.trained is False else version_colour(token.version)
        table.add_row(
            str(position),
            str(token.token_id),
            Text(str(token.version), style=version_colour(token.version)),
            "-" if token.staleness is None else str(token.staleness),
            f"{token.logprob:.3f}",
            f"{exp(token.logprob):.3f}",
            Text(repr(printable(token.text)), style=style),
            _why_masked(token),
        )
    return table


def _why_masked(token: InspectedToken) -> str:
    if not token.chosen:
        return "masked: not the policy's choice"
    return "masked: too old" if token.trained is False else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
