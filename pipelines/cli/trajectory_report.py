"""Trajectories in a terminal: listed, in full, exported, and as a replayed step trained them.

Tokens are coloured by the policy version that sampled them. Where there are no colours, and where
one version follows another, a mark says which version begins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import groupby
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.restore import ComparedStep, compared_values
from areal_flow.log import browse
from areal_flow.log.browse import Selection, ShownToken, ShownTrajectory
from areal_flow.log.queries import Run
from areal_flow.policy.tokenizer.directory import tokenizer_of
from pipelines.console.tables import Report, Table, facts, one_line, printable, write_table_file

if TYPE_CHECKING:  # torch
    from areal_flow.flow.recovery.replay import Replayed
    from areal_flow.training.inspection import InspectedTrajectory

_LISTED = (
    *("trajectory_id", "difficulty", "reward", "passed", "num_tokens", "version_spans"),
    *("finish_reason", "status", "step", "reason", "prompt", "completion"),
)
_COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
_NOT_TRAINED = "dim strike"
_ANSWER_CHARACTERS = 40


def report_listing(run: Run, *, selection: Selection, at: int | None) -> Report:
    identifiers, num_matching = browse.select_trajectories(run, selection, at=at)
    extra = [selection.sort] if selection.sort and selection.sort not in _LISTED else []
    with closing(browse.selected_database(run, identifiers, at=at)) as database:
        rows = browse.read_selected(database, identifiers, [*_LISTED, *extra]).to_pylist()
    more = "" if len(rows) == num_matching else "; --limit K lists more"
    last = f"{len(rows)} of {num_matching} that match{more}; --show # shows one in full"
    data = {"run": run.layout.name, "num_matching": num_matching, "trajectories": rows}
    if not rows:
        return Report(data, [f"no trajectory of {run.layout.name} matches"])
    return Report(data, [listing(rows, extra=extra), Text(last, "dim")])


def export_trajectories(run: Run, *, path: Path, selection: Selection, at: int | None) -> Report:
    identifiers, _ = browse.select_trajectories(run, selection, at=at)
    with closing(run.database(at=at)) as database:
        schema = browse.read_selected(database, []).schema
        num_rows = write_table_file(path, browse.stream_rows(database, identifiers), schema)
    data = {"run": run.layout.name, "file": path, "num_trajectories": num_rows}
    return Report(data, [f"{num_rows} trajectories of {run.layout.name} in {path}"])


def listing(rows: Sequence[dict[str, Any]], *, extra: Sequence[str] = ()) -> Table:
    texts, listed = ("prompt", "completion"), []
    for number, row in enumerate(rows, start=1):
        versions = [str(span["version"]) for span in row["version_spans"]]
        ends = f"{versions[0]}…{versions[-1]}" if len(versions) > 3 else "→".join(versions)
        listed.append(
            {
                "#": number,
                "trajectory": row["trajectory_id"],
                "diff": row["difficulty"],
                "reward": Text(_short(row["reward"]), _reward_style(row)),
                "tokens": row["num_tokens"],
                "versions": ends,
                "end": row["finish_reason"],
                "status": _short_status(row),
                **{name: _short(row[name]) for name in extra},
                **{name: "(dropped)" if row[name] is None else row[name] for name in texts},
            }
        )
    return Table(listed, texts=texts)


def _reward_style(row: dict[str, Any]) -> str:
    return "yellow" if row["reward"] is None else "green" if row["passed"] else "red"


def _short_status(row: dict[str, Any]) -> Text:
    if row["status"] == "trained":
        return Text(f"step {row['step']}")
    return Text(row["reason"], "red") if row["reason"] else Text(row["status"], "dim")


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 24)


def report_trajectory(shown: ShownTrajectory, *, by_token: bool) -> Report:
    row = shown.row
    title = Text.assemble(
        ("trajectory ", "dim"),
        (row["trajectory_id"], "bold"),
        f" of run {shown.run_name}: member {row['member']} of the {len(shown.group)} in "
        f"group {row['submission_index']}",
    )
    prompt, *completion = (
        Padding(text, (0, 0, 0, 2), expand=False)
        for text in (Text(printable(shown.prompt)), *_completion(shown.tokens))
    )
    parts: list[RenderableType] = [title, Text("\nprompt", "bold"), prompt]
    parts += [Text("\ncompletion", "bold"), *completion, "", facts(_facts(shown))]
    if by_token:
        parts += ["", _token_table(shown.tokens)]
    return Report(asdict(shown), parts)


def _completion(tokens: Sequence[ShownToken]) -> list[Text]:
    text, legend = Text(overflow="fold"), []
    spans = [(v, list(span)) for v, span in groupby(tokens, key=lambda token: token.version)]
    for version, span in spans:
        colour = _COLOURS[version % len(_COLOURS)]  # neighbours differ
        text.append(f"⟨v{version}⟩" if len(spans) > 1 else "", style=f"{colour} reverse")
        for token in span:
            text.append(printable(token.text), style=_token_style(token))
        staleness, reasons = span[0].staleness, Counter(filter(None, map(_why_masked, span)))
        line = Text.assemble(("■ ", colour), f"version {version}: {_count(len(span), 'token')}")
        line.append("" if staleness is None else f", staleness {staleness}")
        counted = "".join(f", {number} {reason}" for reason, number in reasons.items())
        legend.append(line.append(counted, style=_NOT_TRAINED))
    return [text, *legend]


def _token_style(token: ShownToken) -> str:
    return _NOT_TRAINED if token.trained is False else _COLOURS[token.version % len(_COLOURS)]


def _facts(shown: ShownTrajectory) -> list[tuple[str, str | Text]]:
    row, batch = shown.row, shown.batch
    advantage = batch and (
        "of what a critic or a reference said: replay the step to see it"
        if batch.advantage is None
        else f"{batch.advantage:+.6g} on each trained token ({batch.advantage_rule}, over the "
        f"{batch.num_trajectories} trajectories of the step)"
    )
    generator = (
        f"{row['generator']}, attempt {row['attempt']}, seed {row['seed']}, "
        f"driver {row['writer_epoch']} of the run"
    )
    return [
        ("reward", _reward(shown)),
        ("end", row["finish_reason"]),
        ("group", _group(shown)),
        ("status", _status(shown)),
        ("advantage", advantage or "none: no step trained it"),
        ("log-probs", _logprobs(shown.tokens)),
        ("prompt", f"{row['prompt_id']}, difficulty {row['difficulty']}"),
        ("generator", generator),
        ("times", _times(shown)),
    ]


def _reward(shown: ShownTrajectory) -> Text:
    reward, detail = shown.row["reward"], json.loads(shown.row["reward_detail"])
    text = Text()
    text.append("none" if reward is None else f"{reward:g}", style=_reward_style(shown.row))
    text.append(f"  {detail.get('verdict', '')}")
    if extracted := detail.get("extracted"):
        text.append(f", answered {printable(extracted)!r}")
    if shown.answer is not None:
        answer = printable(shown.answer)
        if len(answer) > _ANSWER_CHARACTERS:
            answer = f"…{answer[1 - _ANSWER_CHARACTERS :]}"
        text.append(f", expected {answer!r}")
    if len(parts := shown.row["reward_parts"]) > 1:
        listed = (f"{part['name']} {_short(part['reward'])}" for part in parts)
        text.append(f"\nbefore weights: {', '.join(listed)}")
    for name, value in detail.get("extra", {}).items():
        text.append(f"\n{printable(name)}: {printable(str(value))}")
    if message := detail.get("error") or detail.get("message"):
        text.append(f"\n{printable(message)}", style="red" if "error" in detail else "")
    return text.append(f"  ({shown.row['verifier']})", style="dim")


def _group(shown: ShownTrajectory) -> Text:
    text = Text("rewards ")
    for identifier, reward in shown.group:
        here = identifier == shown.row["trajectory_id"]
        value = "-" if reward is None else f"{reward:g}"
        text.append(f"[{value}] " if here else f"{value} ", style="bold" if here else "dim")
    return text


def _status(shown: ShownTrajectory) -> str:
    row = shown.row
    if row["status"] == "discarded":
        return f"discarded, known to step {row['step']}: {row['reason']}"
    if row["status"] == "waiting":
        return "waiting: committed, neither trained nor discarded"
    staleness = "-" if row["staleness"] is None else f"{row['staleness']:.2f}"
    return (
        f"trained in step {row['step']}, which started from version {row['policy_version']}: "
        f"{_count(row['num_trained_tokens'], 'token')} trained, "
        f"{row['num_masked_tokens']} not; "
        f"mean staleness {staleness} of at most {shown.max_staleness}"
    )


def _logprobs(tokens: Sequence[ShownToken]) -> str:
    if not tokens:
        return "none: the completion is empty"
    total = sum(token.logprob for token in tokens)
    position, unlikely = min(enumerate(tokens), key=lambda numbered: numbered[1].logprob)
    return (
        f"sum {total:.2f}, mean {total / len(tokens):.2f}; least likely {unlikely.logprob:.2f} at "
        f"token {position}, {printable(unlikely.text)!r}"
    )


def _times(shown: ShownTrajectory) -> str:
    row, began = shown.row, shown.row["submitted_at"]
    moments = {name: row[f"{name}_at"] for name in ("started", "finished", "scored")}
    if shown.batch is not None:
        moments["trained"] = shown.batch.committed_at
    later = [f"{name} +{(at - began).total_seconds():.3f} s" for name, at in moments.items()]
    return ", ".join([f"submitted {began.astimezone():%Y-%m-%d %H:%M:%S %Z}", *later])


def _token_table(tokens: Sequence[ShownToken]) -> Table:
    rows = [
        {
            "#": number,
            "id": token.token_id,
            "version": token.version,
            "staleness": token.staleness,
            "log-prob": f"{token.logprob:.3f}",
            "prob": f"{exp(token.logprob):.3f}",
            "token": Text(repr(printable(token.text)), _token_style(token)),
            "": (why := _why_masked(token)) and f"masked: {why}",
        }
        for number, token in enumerate(tokens)
    ]
    return Table(rows)


def _why_masked(token: ShownToken) -> str:
    if not token.chosen:
        return "not the policy's choice"
    return "too old" if token.trained is False else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    parts: list[RenderableType] = [_replay_heading(layout, replayed), _step_table(data)]
    parts += [f"Changed: {'; '.join(changes)}."] if changes else []
    parts += data["verdict"]
    if num_trajectories:
        different = most_different(replayed, num_trajectories)
        data["trajectories"] = [asdict(trajectory) for trajectory in different]
        parts.append(_replayed_table(different))
    if tokens_of:
        shown, decode = (
            _trained_trajectory(layout, replayed, tokens_of),
            tokenizer_of(layout.model).decode,
        )
        texts = [decode([token], skip_special_tokens=False) for token in shown.tokens]
        data["tokens_of"] = {**asdict(shown), "texts": texts}
        parts.append(_replayed_token_table(shown, texts))
    return Report(data, parts, code=int(bool(replayed.refused)))


def most_different(replayed: Replayed, num: int) -> list[InspectedTrajectory]:
    """Return the trajectories whose log-probabilities the change, or else the step, moved most."""
    return sorted(replayed.trajectories, key=lambda t: (-t.mean_difference, t.trajectory_id))[:num]


def verdict(replayed: Replayed) -> list[str]:
    """Return the result of the comparison, one sentence per line."""
    steps = (*replayed.before, replayed.compared)
    lines = list(dict.fromkeys(filter(None, map(_environment, steps))))
    for compared in steps:
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


def _replay_heading(layout: RunLayout, replayed: Replayed) -> str:
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


def _replayed_table(shown: Sequence[InspectedTrajectory]) -> Table:
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


def _replayed_token_table(trajectory: InspectedTrajectory, texts: Sequence[str]) -> Table:
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


def _trained_trajectory(
    layout: RunLayout, replayed: Replayed, identifier: str
) -> InspectedTrajectory:
    trajectories = {trajectory.trajectory_id: trajectory for trajectory in replayed.trajectories}
    if identifier not in trajectories:
        identifiers = sorted(trajectories)
        raise RunError(
            f"step {replayed.compared.step} of run {layout.name} did not train trajectory "
            f"{identifier!r}: it trained {len(trajectories)}, from {identifiers[0]} to "
            f"{identifiers[-1]}; --trajectories K shows some of them"
        )
    return trajectories[identifier]
