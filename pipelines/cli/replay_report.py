"""A replayed step beside its record, and what it did to its trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import pandas as pd
from rich.console import RenderableType

from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.recovery.comparison import ComparedStep, compared_values
from areal_flow.recovery.replay import Replayed
from areal_flow.trainer.inspection import InspectedTrajectory
from pipelines.cli.tables import Report, Table

_STEP_COLUMNS = {
    "": "{name}",
    "recorded": "{recorded}",
    "replayed": "{replayed}",
    "equal?": "{equal}",
    "changed": "{changed}",
}
_TRAJECTORY_COLUMNS = {
    "trajectory": "{of.trajectory_id}",
    "reward": "{of.reward:g}",
    "advantage": "{of.replayed.advantage:.3f}",
    "trained": "{of.replayed.num_trained}",
    "masked": "{num_masked}",
    "staleness": "{of.staleness_max}",
    "w mean": "{mean[weight]:.3f}",
    "w max": "{weight_max:.3f}",
    "clipped": "{num_clipped}",
    "logprob behaviour": "{mean[behaviour]:.4f}",
    "before": "{mean[before]:.4f}",
    "replayed": "{mean[replayed]:.4f}",
    "changed": "{mean[changed]:.4f}",
    "mean |difference|": "{of.mean_difference:.2e}",
}
_TOKEN_COLUMNS = {
    "": "{index}",
    "token": "{token}",
    "version": "{version}",
    "logprob behaviour": "{behaviour:.5f}",
    "before": "{before:.5f}",
    "w": "{weight:.4f}",
    "replayed": "{replayed:.5f}",
    "changed": "{changed:.5f}",
    "difference": "{difference:+.2e}",
    "masked?": "{masked}",
}


def report_replay(
    layout: RunLayout, replayed: Replayed, *, num_trajectories: int, tokens_of: str | None
) -> Report:
    """Report the step beside its record, then what was asked for of its trajectories.

    The exit code is 1 if a step differs where it must not.

    Raises:
        RunError: the step did not train `tokens_of`.
    """
    found: dict[str, Any] = {
        "run": layout.name,
        "checkpoint": replayed.checkpoint,
        "before": [_compared(compared) for compared in replayed.before],
        **_compared(replayed.compared),
        "changed": compared_values(replayed.changed) if replayed.changed else None,
        "changes": replayed.changes,
        "verdict": verdict(replayed),
    }
    changes = [f"{name} {before} -> {after}" for name, (before, after) in replayed.changes.items()]
    parts: list[RenderableType] = [_beginning(layout, replayed), _step_table(found)]
    parts += [f"Changed: {'; '.join(changes)}."] if changes else []
    parts += found["verdict"]
    if num_trajectories:
        different = most_different(replayed, num_trajectories)
        found["trajectories"] = [asdict(trajectory) for trajectory in different]
        parts.append(_trajectory_table(different, replayed.changed))
    if tokens_of:
        shown = _trajectory(layout, replayed, tokens_of)
        texts = _token_texts(layout, shown)
        found["tokens_of"] = {**asdict(shown), "texts": texts}
        rows = _tokens(shown).assign(token=list(map(repr, texts))).reset_index().to_dict("records")
        columns = _columns(_TOKEN_COLUMNS, replayed.changed)
        parts.append(Table(columns, rows, f"Trajectory {shown.trajectory_id}"))
    return Report(found, parts, code=int(bool(replayed.refused)))


def most_different(replayed: Replayed, num: int) -> list[InspectedTrajectory]:
    """Return the trajectories that the change, or else the step, moved most; the most first."""
    by_difference = sorted(
        replayed.trajectories, key=lambda t: (-t.mean_difference, t.trajectory_id)
    )
    return by_difference[:num]


def verdict(replayed: Replayed) -> list[str]:
    """Return what a reader must know about the comparison, one sentence a line."""
    walked = (*replayed.before, replayed.compared)
    lines = list(dict.fromkeys(filter(None, map(_environment, walked))))
    for compared in walked:
        if compared.refused:
            lines.append(
                f"Step {compared.step} DIFFERS where it must not, in "
                f"{', '.join(compared.differences)}: the numeric environment is the recorded one, "
                "so the ledger, the log, a checkpoint, config.toml or the code has changed since."
            )
        elif not compared.equal:
            forked = compared.after_fork
            why = "an earlier step differed." if forked else "see the environment above."
            lines.append(f"Step {compared.step} differs, as it may: {why}")
    if replayed.compared.equal:
        lines.append(f"Step {replayed.compared.step} is equal to its record, bit for bit.")
    return lines


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


def _columns(columns: dict[str, str], changed: object) -> dict[str, str]:
    return {label: of for label, of in columns.items() if changed or label != "changed"}


def _step_table(found: dict[str, Any]) -> Table:
    computed = {of: found[of] or {} for of in ("recorded", "replayed", "changed")}
    rows = []
    for name in dict.fromkeys(chain(*computed.values())):  # another algorithm has other metrics
        recorded, again, _ = values = [column.get(name) for column in computed.values()]
        equal = "yes" if recorded == again else "NO"
        row = dict(zip(computed, map(_value, values), strict=True))
        row["equal"] = None if recorded is None and again is None else equal
        rows.append({"name": name.replace("_", " "), **row})
    return Table(_columns(_STEP_COLUMNS, found["changed"]), rows)


def _value(value: float | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value and value[:12]
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _trajectory_table(shown: Sequence[InspectedTrajectory], changed: object) -> Table:
    rows = []
    for trajectory in shown:
        tokens = _tokens(trajectory)
        row = {"of": trajectory, "mean": tokens.mean(numeric_only=True).fillna(0.0)}
        row["num_masked"] = len(tokens) - trajectory.replayed.num_trained
        row["num_clipped"] = sum(trajectory.replayed.clipped)
        rows.append(row | {"weight_max": tokens["weight"].max() if len(tokens) else 1.0})
    title = f"The {len(shown)} trajectories that differ most; mean log-probabilities"
    return Table(_columns(_TRAJECTORY_COLUMNS, changed), rows, title)


def _tokens(trajectory: InspectedTrajectory) -> pd.DataFrame:
    replayed, changed = trajectory.replayed, trajectory.changed
    would_train = changed.trained if changed else replayed.trained
    masked = {
        (True, True): "",
        (False, False): "masked",
        (True, False): "masked if changed",
        (False, True): "masked, trained if changed",
    }
    return pd.DataFrame(
        {
            "version": trajectory.versions,
            "behaviour": trajectory.behavior_logprobs,
            "before": trajectory.proximal_logprobs,
            "weight": trajectory.importance_weights,
            "replayed": replayed.logprobs,
            "changed": changed.logprobs if changed else None,
            "difference": trajectory.differences,
            "masked": [masked[both] for both in zip(replayed.trained, would_train, strict=True)],
        }
    )


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
