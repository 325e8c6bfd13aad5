"""Prints a replayed step: tables for a reader, or one JSON object for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from rich.console import Console

from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.recovery.replay import Replayed
from areal_flow.recovery.restore import ComparedStep, compared_values
from areal_flow.trainer.inspection import InspectedTrajectory
from pipelines.cli.tables import make_console, print_table

HASH_CHARACTERS = 12


def print_report(
    layout: RunLayout, replayed: Replayed, *, num_trajectories: int, tokens_of: str | None
) -> None:
    """Print the step beside its record, then what was asked for of its trajectories.

    Raises:
        RunError: the step did not train `tokens_of`.
    """
    shown = _trajectory(layout, replayed, tokens_of) if tokens_of else None
    console = make_console()
    console.print(_beginning(layout, replayed), soft_wrap=True)
    _print_step(console, replayed)
    for line in [*_changes(replayed), *verdict(replayed)]:
        console.print(line, soft_wrap=True)
    if num_trajectories:
        _print_trajectories(console, most_different(replayed, num_trajectories))
    if shown:
        _print_tokens(console, shown, _token_texts(layout, shown))


def print_json(
    layout: RunLayout, replayed: Replayed, *, num_trajectories: int, tokens_of: str | None
) -> None:
    """Print everything that `print_report` does as one JSON object.

    Raises:
        RunError: the step did not train `tokens_of`.
    """
    report: dict[str, Any] = {
        "run": layout.name,
        "checkpoint": replayed.checkpoint,
        "before": [_compared(compared) for compared in replayed.before],
        **_compared(replayed.compared),
        "changed": compared_values(replayed.changed) if replayed.changed else None,
        "changes": replayed.changes,
        "verdict": verdict(replayed),
    }
    if num_trajectories:
        shown = most_different(replayed, num_trajectories)
        report["trajectories"] = [asdict(trajectory) for trajectory in shown]
    if tokens_of:
        trajectory = _trajectory(layout, replayed, tokens_of)
        texts = _token_texts(layout, trajectory)
        report["tokens_of"] = {**asdict(trajectory), "texts": texts}
    print(json.dumps(report))


def most_different(replayed: Replayed, num: int) -> list[InspectedTrajectory]:
    """Return the trajectories that the change, or else the step, moved most; the most first."""
    by_difference = sorted(
        replayed.trajectories, key=lambda t: (-t.mean_difference, t.trajectory_id)
    )
    return by_difference[:num]


def verdict(replayed: Replayed) -> list[str]:
    """Return what a reader must know about the comparison, one sentence a line."""
    lines = [_environment(compared) for compared in (*replayed.before, replayed.compared)]
    lines = list(dict.fromkeys(line for line in lines if line))
    lines += [
        f"Step {compared.step} DIFFERS where it must not, in {', '.join(compared.differences)}: "
        "the numeric environment is the recorded one, so the ledger, the log, a checkpoint, "
        "config.toml or the code has changed since."
        for compared in replayed.refused
    ]
    forked = [c for c in (*replayed.before, replayed.compared) if not (c.equal or c.refused)]
    lines += [
        f"Step {compared.step} differs, as it may: "
        + ("an earlier step differed." if compared.after_fork else "see the environment above.")
        for compared in forked
    ]
    if replayed.compared.equal:
        lines.append(f"Step {replayed.compared.step} is equal to its record, bit for bit.")
    return lines


def _changes(replayed: Replayed) -> list[str]:
    parts = [f"{name} {before} -> {after}" for name, (before, after) in replayed.changes.items()]
    return [f"Changed: {'; '.join(parts)}."] if parts else []


def _environment(compared: ComparedStep) -> str:
    there_and_here = compared.environment_differences
    if there_and_here:
        parts = [
            f"{name} {there} there, {here} here" for name, (there, here) in there_and_here.items()
        ]
        return f"Recorded in another numeric environment: {'; '.join(parts)}. Bits may differ."
    if json.loads(compared.replayed.numeric_environment)["device"] != "cpu":
        return "Computed on a GPU, where sums may come out in another order: bits may differ."
    return ""


def _beginning(layout: RunLayout, replayed: Replayed) -> str:
    start = (
        f"Run {layout.name}, step {replayed.compared.step}, from checkpoint {replayed.checkpoint}"
    )
    if not replayed.before:
        return f"{start}."
    num_equal = sum(compared.equal for compared in replayed.before)
    first, last = replayed.before[0].step, replayed.before[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{start}; {steps} on the way: {num_equal} of {len(replayed.before)} equal."


def _compared(compared: ComparedStep) -> dict[str, Any]:
    return {
        "step": compared.step,
        "recorded": compared_values(compared.recorded),
        "replayed": compared_values(compared.replayed),
        "equal": compared.equal,
        "refused": compared.refused,
        "environment_differences": compared.environment_differences,
    }


def _print_step(console: Console, replayed: Replayed) -> None:
    columns = [compared_values(replayed.recorded), compared_values(replayed.replayed)]
    labels = ["", "recorded", "replayed", "equal?"]
    if replayed.changed:
        columns.append(compared_values(replayed.changed))
        labels.append("changed")
    rows = []
    for name in dict.fromkeys(chain(*columns)):  # another algorithm has other metrics
        recorded, again, *changed = (_value(column.get(name, "-")) for column in columns)
        equal = "yes" if name not in replayed.compared.differences else "NO"
        rows.append((name.replace("_", " "), recorded, again, equal, *changed))
    print_table(console, labels, rows)


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value[:HASH_CHARACTERS]
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _print_trajectories(console: Console, shown: Sequence[InspectedTrajectory]) -> None:
    labels = (
        *("trajectory", "reward", "advantage", "trained", "masked", "staleness"),
        *("w mean", "w max", "clipped", "logprob behaviour", "before", "replayed"),
        *(["changed"] if shown and shown[0].changed else []),
        "mean |difference|",
    )
    title = f"The {len(shown)} trajectories that differ most; mean log-probabilities"
    print_table(console, labels, [_trajectory_row(trajectory) for trajectory in shown], title=title)


def _trajectory_row(trajectory: InspectedTrajectory) -> tuple[str, ...]:
    outcome, weights = trajectory.replayed, trajectory.importance_weights
    return (
        trajectory.trajectory_id,
        f"{trajectory.reward:g}",
        f"{outcome.advantage:.3f}",
        str(outcome.num_trained),
        str(len(trajectory.tokens) - outcome.num_trained),
        str(trajectory.staleness_max),
        f"{_mean(weights):.3f}",
        f"{max(weights, default=1.0):.3f}",
        str(sum(outcome.clipped)),
        f"{_mean(trajectory.behavior_logprobs):.4f}",
        f"{_mean(trajectory.proximal_logprobs):.4f}",
        f"{_mean(outcome.logprobs):.4f}",
        *([f"{_mean(trajectory.changed.logprobs):.4f}"] if trajectory.changed else []),
        f"{trajectory.mean_difference:.2e}",
    )


def _print_tokens(console: Console, trajectory: InspectedTrajectory, texts: Sequence[str]) -> None:
    labels = (
        *("", "token", "version", "logprob behaviour", "before", "w", "replayed"),
        *(["changed"] if trajectory.changed else []),
        *("difference", "masked?"),
    )
    rows = [
        (
            str(index),
            repr(text),
            str(trajectory.versions[index]),
            f"{trajectory.behavior_logprobs[index]:.5f}",
            f"{trajectory.proximal_logprobs[index]:.5f}",
            f"{trajectory.importance_weights[index]:.4f}",
            f"{trajectory.replayed.logprobs[index]:.5f}",
            *([f"{trajectory.changed.logprobs[index]:.5f}"] if trajectory.changed else []),
            f"{trajectory.differences[index]:+.2e}",
            _masked(trajectory, index),
        )
        for index, text in enumerate(texts)
    ]
    print_table(console, labels, rows, title=f"Trajectory {trajectory.trajectory_id}")


def _masked(trajectory: InspectedTrajectory, index: int) -> str:
    trained = trajectory.replayed.trained[index]
    changed = trajectory.changed.trained[index] if trajectory.changed else trained
    if trained == changed:
        return "" if trained else "masked"
    return "masked if changed" if trained else "masked, trained if changed"


def _trajectory(layout: RunLayout, replayed: Replayed, identifier: str) -> InspectedTrajectory:
    found = {trajectory.trajectory_id: trajectory for trajectory in replayed.trajectories}
    if identifier not in found:
        identifiers = sorted(found)
        raise RunError(
            f"step {replayed.compared.step} of run {layout.name} did not train trajectory "
            f"{identifier!r}: it trained {len(found)}, from {identifiers[0]} to {identifiers[-1]}; "
            "--trajectories K shows some of them"
        )
    return found[identifier]


def _token_texts(layout: RunLayout, trajectory: InspectedTrajectory) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(layout.model / "tokenizer.json"))
    return [tokenizer.decode([token], skip_special_tokens=False) for token in trajectory.tokens]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
