"""A replayed step beside its record, and what it did to its trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import Replayed
from areal_flow.flow.recovery.restore import ComparedStep, compared_values
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.training.inspection import InspectedTrajectory
from pipelines.console.tables import Report, Table


def report_replay(
    layout: RunLayout, replayed: Replayed, *, num_trajectories: int, tokens_of: str | None
) -> Report:
    data: dict[str, Any] = {
        "run": layout.name,
        "checkpoint": replayed.checkpoint,
        "before": [_compared(compared) for compared in replayed.before],
        **_compared(replayed.compared),
        "changed": compared_values(replayed.changed) if replayed.changed else None,
        "changes": replayed.changes,
        "verdict": verdict(replayed),
    }
    changes = [f"{name} {before} -> {after}" for name, (before, after) in replayed.changes.items()]
    parts: list[RenderableType] = [_beginning(layout, replayed), _step_table(data)]
    parts += [f"Changed: {'; '.join(changes)}."] if changes else []
    parts += data["verdict"]
    if num_trajectories:
        different = most_different(replayed, num_trajectories)
        data["trajectories"] = [asdict(trajectory) for trajectory in different]
        parts.append(_trajectory_table(different))
    if tokens_of:
        shown, decode = _trajectory(layout, replayed, tokens_of), tokenizer_of(layout.model).decode
        texts = [decode([token], skip_special_tokens=False) for token in shown.tokens]
        data["tokens_of"] = {**asdict(shown), "texts": texts}
        parts.append(_token_table(shown, texts))
    return Report(data, parts, code=int(bool(replayed.refused)))


def most_different(replayed: Replayed, num: int) -> list[InspectedTrajectory]:
    """Return the trajectories that the change, or else the step, moved most; the most first."""
    return sorted(replayed.trajectories, key=lambda t: (-t.mean_difference, t.trajectory_id))[:num]


def verdict(replayed: Replayed) -> list[str]:
    """Return what a reader must know about the comparison, one sentence a line."""
    walked = (*replayed.before, replayed.compared)
    lines = list(dict.fromkeys(filter(None, map(_environment, walked))))
    for compared in walked:
        if compared.refused:
            by = f" by more than {compared.tolerance:g}" if compared.tolerance else ""
            lines.append(
                f"Step {compared.step} DIFFERS where it must not{by}, in "
                f"{', '.join(compared.differences)}: the numeric environment is the recorded one, "
                "so the ledger, the log, a checkpoint, config.toml or the code has changed since."
            )
        elif compared.tolerance and compared.within_tolerance:
            why = (
                "its ranks shared the policy or its sequences, which this process has whole."
                if compared.repeats_bits
                else "a GPU repeats bits with trainer.kernels = 'deterministic' only."
            )
            lines.append(
                f"Step {compared.step} is equal to its record within {compared.tolerance:g}: {why}"
            )
        elif not compared.equal:
            forked = compared.after_fork
            why = "an earlier step differed." if forked else "see the environment above."
            lines.append(f"Step {compared.step} differs, as it may: {why}")
    if replayed.compared.equal:
        lines.append(f"Step {replayed.compared.step} is equal to its record, bit for bit.")
    return lines


def _environment(compared: ComparedStep) -> str:
    if differences := compared.environment_differences:
        parts = (
            f"{name} {there} there, {here} here" for name, (there, here) in differences.items()
        )
        return f"Recorded in another numeric environment: {'; '.join(parts)}. Bits may differ."
    if json.loads(compared.replayed.numeric_environment)["device"] != "cpu":
        return "Computed on a GPU, where sums may come out in another order: bits may differ."
    return ""


def _beginning(layout: RunLayout, replayed: Replayed) -> str:
    step, checkpoint = replayed.compared.step, replayed.checkpoint
    start = f"Run {layout.name}, step {step}, from checkpoint {checkpoint}"
    if not replayed.before:
        return f"{start}."
    num_equal = sum(compared.equal for compared in replayed.before)
    first, last = replayed.before[0].step, replayed.before[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{start}; {steps} on the way: {num_equal} of {len(replayed.before)} equal."


def _compared(compared: ComparedStep) -> dict[str, Any]:
    values = {name: compared_values(getattr(compared, name)) for name in ("recorded", "replayed")}
    names = ("equal", "within_tolerance", "refused", "environment_differences")
    return {"step": compared.step, **values, **{name: getattr(compared, name) for name in names}}


def _step_table(data: dict[str, Any]) -> Table:
    recorded, replayed, changed = (data[of] for of in ("recorded", "replayed", "changed"))
    rows = []
    for name in {**recorded, **replayed, **(changed or {})}:  # another algorithm has other metrics
        there, here = recorded.get(name), replayed.get(name)
        row = {"": name.replace("_", " "), "recorded": _value(there), "replayed": _value(here)}
        row["equal?"] = None if there is None else "yes" if there == here else "NO"
        rows.append(row | ({"changed": _value(changed.get(name))} if changed else {}))
    return Table(rows)


def _value(value: float | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value and value[:12]
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _trajectory_table(shown: Sequence[InspectedTrajectory]) -> Table:
    rows = [
        {
            "trajectory": t.trajectory_id,
            "reward": f"{t.reward:g}",
            "advantage": f"{t.replayed.advantage:.3f}",
            "trained": t.replayed.num_trained,
            "environment": sum(
                not (trained or too_old)
                for trained, too_old in zip(t.replayed.trained, t.too_old, strict=True)
            ),
            "too old": sum(t.too_old),
            "staleness": t.staleness_max,
            "w mean": f"{_mean(t.importance_weights):.3f}",
            "w max": f"{max(t.importance_weights, default=1.0):.3f}",
            "clipped": sum(t.replayed.clipped),
            "logprob behaviour": f"{_mean(t.behavior_logprobs):.4f}",
            "before": f"{_mean(t.proximal_logprobs):.4f}",
            "replayed": f"{_mean(t.replayed.logprobs):.4f}",
            **({"changed": f"{_mean(c.logprobs):.4f}"} if (c := t.changed) else {}),
            "mean |difference|": f"{t.mean_difference:.2e}",
        }
        for t in shown
    ]
    return Table(rows, f"The {len(shown)} trajectories that differ most; mean log-probabilities")


def _token_table(trajectory: InspectedTrajectory, texts: Sequence[str]) -> Table:
    weights, differences = trajectory.importance_weights, trajectory.differences
    changed = trajectory.changed
    rows = [
        {
            "": index,
            "token": repr(text),
            "version": trajectory.versions[index],
            "logprob behaviour": f"{trajectory.behavior_logprobs[index]:.5f}",
            "before": f"{trajectory.proximal_logprobs[index]:.5f}",
            "w": f"{weights[index]:.4f}",
            "replayed": f"{trajectory.replayed.logprobs[index]:.5f}",
            **({"changed": f"{changed.logprobs[index]:.5f}"} if changed else {}),
            "difference": f"{differences[index]:+.2e}",
            "masked?": _masked(trajectory, index),
        }
        for index, text in enumerate(texts)
    ]
    return Table(rows, f"Trajectory {trajectory.trajectory_id}")


def _masked(trajectory: InspectedTrajectory, index: int) -> str:
    trained = trajectory.replayed.trained[index]
    changed = trajectory.changed.trained[index] if trajectory.changed else trained
    if trained == changed:
        why = "too old" if trajectory.too_old[index] else "environment"
        return "" if trained else f"masked: {why}"
    return "masked if changed" if trained else "masked, trained if changed"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _trajectory(layout: RunLayout, replayed: Replayed, identifier: str) -> InspectedTrajectory:
    trajectories = {trajectory.trajectory_id: trajectory for trajectory in replayed.trajectories}
    if identifier not in trajectories:
        identifiers = sorted(trajectories)
        raise RunError(
            f"step {replayed.compared.step} of run {layout.name} did not train trajectory "
            f"{identifier!r}: it trained {len(trajectories)}, from {identifiers[0]} to "
            f"{identifiers[-1]}; --trajectories K shows some of them"
        )
    return trajectories[identifier]
