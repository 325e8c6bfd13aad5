"""From import to a trained policy: in a bare script, and on a running event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from tests.integration.runs import SMALL, check_accounting, run_script

SETTINGS: dict[str, Any] = {
    **{key: SMALL[key] for key in ("generation", "controller", "trainer", "tracking")},
    "num_steps": 2,
}
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "difficulty": n % 3} for n in range(40)]

SCRIPT = f"""
import areal_flow
def brevity(*, prompt, completion, answer): return 1.0 / (1 + len(completion)) + BONUS
BONUS = 0.25
rows = [{{"question": f"{{n}} + 1 =", "answer": str(n + 1)}} for n in range(40)]
run = areal_flow.train(prompts=rows, rewards=[brevity], name="five", **{SETTINGS!r})
print(len(run.steps()) - 1, run.trajectories().reward.min() > 0.25)
"""


@pytest.mark.slow
def test_five_lines_from_import_to_a_trained_policy(tmp_path: Path) -> None:
    assert run_script(SCRIPT, cwd=tmp_path, timeout=120).strip().splitlines()[-1] == "2 True"
    layout = RunLayout((tmp_path / "runs" / "five").resolve())
    check_accounting(layout)
    (source,) = layout.rewards.glob("brevity*.py")
    assert "def brevity" in source.read_text()


@pytest.mark.slow
async def test_fine_tuned_trained_and_evaluated_in_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook cell; the tables are pandas."""
    assert asyncio.get_running_loop().is_running()
    completions = pd.DataFrame(
        [{"prompt": row["question"], "completion": f" #### {row['answer']}"} for row in ROWS]
    )
    runs = tmp_path / "runs"
    policy = areal_flow.sft(
        rows=completions,
        runs=runs,
        name="taught",
        sft={"num_steps": 30, "batch_size": 8, "learning_rate": 5e-3},
        **{key: SETTINGS[key] for key in ("generation", "trainer")},
    )
    assert json.loads((policy / "state.json").read_text())["step"] == 30
    assert (policy / "tokenizer.json").is_file()
    run = areal_flow.train(
        prompts=pd.DataFrame(ROWS), model=policy, runs=runs, name="trained", **SETTINGS
    )
    assert len(run.steps()) == 3
    assert set(run.trajectories().difficulty) <= {0, 1, 2}
    check_accounting(run.layout)
    result = areal_flow.evaluate(run, prompts=ROWS, num_prompts=8)
    assert result.table.overall.passed.n == 8
    assert len(result.answers) == 8
