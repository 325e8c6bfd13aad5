"""Runs that trained on groups of two, with held-out answers, made without a cluster."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.pass_rates import HELD_OUT, PASS_RATE
from areal_flow.core.types import trajectory_id
from areal_flow.log.directory import State, create_run, hold_run, leave_run
from areal_flow.log.run_log import RunLog, append_evaluation, create_logs
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.rows import append, commit, written_group
from tests.tracked_runs import BEGAN, step_row

HOSTILE = "</td></script><script>alert(1)</script><img src=x onerror=alert(2)>"


def answers(
    name: str, version: int, *, reward: float, text: str, verifier: str = "numeric@0"
) -> list[dict[str, Any]]:
    verdict = "correct" if reward else "incorrect"
    return [
        {
            "evaluation": name,
            "writer_epoch": 1,
            "policy_version": version,
            "version_spans": [{"version": version, "length": 3}],
            "held_out": HELD_OUT,
            "prompt_id": f"held-out-{n}",
            "sample": 0,
            "source": "",
            "difficulty": 3 + n % 2,
            "prompt": f"{n} + {text}",
            "completion": text,
            "answer": text,
            "num_output_tokens": 3,
            "finish_reason": "stop",
            "reward": reward,
            "reward_detail": json.dumps({"verdict": verdict}),
            "verifier": verifier,
            "evaluated_at": datetime.now(UTC),
        }
        for n in range(6)
    ]


def make_finished_run(
    root: Path,
    *,
    num_steps: int,
    evaluated: bool = True,
    state: State = "finished",
    accepted_at: int | None = None,
) -> RunLayout:
    """Make a run that trained one group per step and sometimes gave up another.

    Args:
        accepted_at: the step from which on another verifier scored.
    """
    layout = RunLayout(root)
    create_run(layout, Recipe(num_steps=max(1, num_steps)))
    write_tiny_model(layout.model, max_model_len=32)
    create_logs(layout)
    _write_workers(layout, num_steps)
    with hold_run(layout) as writer:
        _fill(layout, writer, num_steps, accepted_at=accepted_at)
        if evaluated:
            before = answers("before", 0, reward=0.0, text=HOSTILE)
            append_evaluation(layout, before, writer)
            last = "numeric@1" if accepted_at else "numeric@0"
            after = answers("after", num_steps, reward=1.0, text="#### 4", verifier=last)
            append_evaluation(layout, after, writer)
        if state != "crashed":
            leave_run(layout, writer, state, seconds=1.0)
    return layout


def _write_workers(layout: RunLayout, num_steps: int) -> None:
    """Record that a generator and a trainer were alive during training."""
    events = [("joined", 0), ("left", num_steps)]
    rows = [
        {
            "at": BEGAN.timestamp() + after,
            "writer_epoch": 1,
            "event": event,
            "worker": f"{role}-0",
            "role": role,
            "num_devices": 1,
            "is_gpu": False,
        }
        for event, after in events
        for role in ("generator", "trainer")
    ]
    layout.workers.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _fill(layout: RunLayout, writer: Writer, num_steps: int, *, accepted_at: int | None) -> None:
    log = RunLog(layout, writer)
    for step in range(num_steps + 1):
        accepted = accepted_at is not None and step >= accepted_at
        columns: dict[str, Any] = {"verifier": "numeric@1" if accepted else "numeric@0"}
        if step:
            commit(log, written_group(layout.trajectories, step, version=step - 1))
            trained = [trajectory_id(step, member) for member in range(2)]
            columns["trajectory_ids"] = trained
            columns["failed_submissions"] = [7] if step == 2 else []
        watermark = log.watermark
        metrics = {"zeal": step, PASS_RATE: 0.5}
        metrics |= {f"pass_rate/difficulty_{n}": step / n for n in (2, 10)}
        metrics["speed/generated_tokens_per_s"] = step
        row = step_row(step, trajectory_watermark=watermark, metrics=metrics, **columns)
        append(log, {**row, "policy_version": max(0, step - 1), "step_s": 1.0})
