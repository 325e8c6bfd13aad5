"""The GPU benchmarks work on a CPU: every part, in small."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.policy.tokenizer.directory import (
    chat_template_of,
    stop_token_ids,
    tokenizer_of,
)
from areal_flow.rollout.engines.protocol import VLLMSettings
from areal_flow.rollout.prompts.completions import RowEncoder
from areal_flow.rollout.prompts.prepare import prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from benchmarks import gpu, gpu_generation, gpu_gsm8k, harness
from pipelines.jobs.job import recipe_path


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: str
) -> tuple[str, dict[str, Any]]:
    docs, report = tmp_path / "benchmarks.md", tmp_path / "report.json"
    docs.write_text(f"before\n<!-- {gpu.MARKER} -->\nold\n<!-- end of {gpu.MARKER} -->\nafter\n")
    chosen = ["--tiny", "--parts", *parts, "--docs", str(docs), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu", *chosen])
    gpu.main()
    return docs.read_text(), json.loads(report.read_text())["tables"]


@pytest.mark.walk
def test_parts_fill_the_table_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tables = measured(
        tmp_path, monkeypatch, "tests", "step", "long_step", "memory", "generation"
    )
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = [row for table in tables.values() for row in table]
    assert {"tokens_per_s", "of_matrix_rate", "ratio", "stall_ms", "load_gb_per_s"} <= {
        name for row in rows for name in row
    }
    assert not any("failed" in row for row in rows)
    assert "skipped" in tables["`tests/gpu`"][0]["result"]
    heads = [line for line in text.splitlines() if line.startswith("| --- |")]
    assert len(heads) == len(tables)


@pytest.mark.walk
def test_a_run_is_killed_resumed_audited_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables = measured(tmp_path, monkeypatch, "run")
    (rows,) = tables.values()
    assert [row["part"] for row in rows] == ["train", "resume", "audit", "replay", "a step"]
    assert "bit for bit" in rows[3]["result"]


def test_a_part_that_fails_or_hangs_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = gpu.Part("benchmarks.nothing", 60)
    monkeypatch.setitem(gpu.PARTS, "step", failing)
    tables, worked = gpu.run_part("step", tiny=True)
    assert not worked
    assert "nothing" in tables["step"][0]["failed"]
    monkeypatch.setitem(gpu.PARTS, "step", gpu.Part("timeit", 1, tiny="while(1):pass", title="x"))
    tables, worked = gpu.run_part("step", tiny=True)
    assert (tables, worked) == ({"step": [{"failed": "not done after 1 s"}]}, False)


def test_each_part_is_in_the_docs_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken away leaves its results so far; the most important come first."""
    assert [*gpu.PARTS][:3] == ["step", "generation", "run"]
    seen: list[str] = []

    def run_part(name: str, **_: Any) -> Any:
        if seen:
            assert seen[-1] in (tmp_path / "benchmarks.md").read_text()
        seen.append(f"table of {name}")
        return {seen[-1]: [{"result": 1}]}, True

    monkeypatch.setattr(gpu, "run_part", run_part)
    text, _ = measured(tmp_path, monkeypatch, "step", "generation", "run")
    assert all(title in text for title in seen)


def test_vllm_s_settings_are_of_vllm_on_a_gpu_alone() -> None:
    """The engine `torch` refused them, so that it could not be measured on a GPU."""
    chosen = argparse.Namespace(
        device="cuda", dtype="bfloat16", groups=2, members=2, tokens=8, engine="torch"
    )
    assert gpu_generation.settings_of(chosen).vllm == VLLMSettings()
    chosen.engine = "vllm"
    assert gpu_generation.settings_of(chosen).vllm.gpu_memory_utilization == 0.7


def test_all_parts_together_end_within_25_minutes() -> None:
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= 25 * 60


def test_the_docs_have_the_place_of_the_tables(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks.md"
    copy.write_text((harness.ROOT / "docs" / "benchmarks.md").read_text())
    harness.write_between(copy, gpu.MARKER, "the tables")
    assert "the tables" in copy.read_text()


GSM8K_ROW = {
    "question": "Each of 2 hens lays 36 eggs. How many eggs?",
    "answer": "They lay 2*36 = <<2*36=72>>72 eggs.\n#### 72",
}


def gsm8k_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_gsm8k", *words])
    gpu_gsm8k.main()


@pytest.mark.slow
def test_two_commands_fine_tune_train_kill_resume_evaluate_and_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--tiny", "--root", str(tmp_path / "root"), "--json", str(tmp_path / "report.json")]
    gsm8k_command(monkeypatch, "first", *options)
    assert harness.newest_step(tmp_path / "root", gpu_gsm8k.NAME) >= gpu_gsm8k.TINY_STEPS // 2
    with pytest.raises(SystemExit, match="go on with `second`"):
        gsm8k_command(monkeypatch, "first", *options)
    gsm8k_command(monkeypatch, "second", *options)
    parts, test_problems, training_problems, speed = json.loads(
        (tmp_path / "report.json").read_text()
    )["tables"].values()
    results = {row["part"]: row["result"] for row in parts}
    assert [*results] == [
        *("fine-tuning", "plan", "training", "resume", "audit", "replay"),
        "all",
    ]
    assert results["fine-tuning"].startswith("20 steps, loss 6.")
    assert results["resume"] == "to step 6 of 6"
    assert results["audit"].startswith("clean")
    assert "bit for bit" in results["replay"]
    assert [row[""] for row in test_problems] == ["before RL", "after RL", "difference"]
    assert test_problems[1]["prompts"] == 16
    assert len(training_problems) == 2
    assert all(row["predicted"] >= 0 and row["measured"] >= 0 for row in speed)


def test_second_makes_a_short_run_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(gpu_gsm8k, "first", lambda *_, **short: calls.append(short))
    monkeypatch.setattr(gpu_gsm8k, "second", lambda *_: calls.append("second") or 0)
    monkeypatch.setattr(gpu_gsm8k, "tables_of", lambda *_: {})
    options = ["second", "--tiny", "--root", str(tmp_path)]
    gsm8k_command(monkeypatch, *options)
    assert calls == [gpu_gsm8k.SHORT, "second"]
    run = tmp_path / "runs" / gpu_gsm8k.NAME
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    gsm8k_command(monkeypatch, *options)
    assert calls[2:] == ["second"]


def test_a_plan_may_come_from_a_file_and_is_not_needed(tmp_path: Path) -> None:
    file, kept = tmp_path / "made.json", tmp_path / gpu_gsm8k.PLAN
    chosen = argparse.Namespace(root=tmp_path, plan=file)
    assert gpu_gsm8k.start_plan(chosen) is None
    file.write_text("Traceback")
    assert gpu_gsm8k.keep_plan(chosen, None) == "failed: it printed nothing"
    assert not kept.exists()
    planned = {"step_s": 4.8, "memory": {"trainer_rank_gib": 32.8, "gpu_gib": 79.1}}
    file.write_text(json.dumps(planned))
    text = "4.8 s a step, 32.8 of 79.1 GiB for the trainer"
    assert gpu_gsm8k.keep_plan(chosen, None) == text
    assert json.loads(kept.read_text()) == planned


def test_a_budget_shortens_training_and_never_forbids_it() -> None:
    assert gpu_gsm8k.seconds_to_kill(200) == 200 - gpu_gsm8k.KILL_S
    assert gpu_gsm8k.seconds_to_kill(-3) == 0
    after = gpu_gsm8k.AFTER_TRAINING_S
    assert gpu_gsm8k.minutes_of_training(after + 120) == pytest.approx(2)
    assert gpu_gsm8k.minutes_of_training(after - 60) == gpu_gsm8k.MIN_TRAINING_S / 60


def test_parts_are_in_a_file_as_soon_as_they_are_done(tmp_path: Path) -> None:
    parts = gpu_gsm8k.Parts(tmp_path / "parts.json", 100)
    parts.run("resume", lambda: "to step 4")
    with pytest.raises(ZeroDivisionError):
        parts.run("audit", lambda: str(1 / 0))
    (row,) = json.loads((tmp_path / "parts.json").read_text())
    assert (row["part"], row["result"]) == ("resume", "to step 4")
    assert 99 < parts.left_s() < 100


def test_fine_tuning_reads_the_prompts_of_training_without_calculator_annotations(
    tmp_path: Path,
) -> None:
    model, _ = gpu_gsm8k.write_tiny(tmp_path)
    recipe = load_recipe(recipe_path(Path(gpu_gsm8k.RECIPE)))
    tokenizer, stop = tokenizer_of(model), stop_token_ids(model)
    encoder = RowEncoder(tokenizer, stop_token_ids=stop, chat=chat_template_of(model))
    row = gpu_gsm8k.sft_row(GSM8K_ROW, recipe.prompts.template)
    prompt, (((answer),),) = encoder.encode(row, ["completion"])
    assert tokenizer.decode(answer) == "They lay 2*36 = 72 eggs.\n#### 72"
    assert answer[-1] == stop[0]
    layout = RunLayout(tmp_path)
    path = gpu_gsm8k.write_rows(tmp_path / "rows.jsonl", [GSM8K_ROW])
    changed = {"prompts": {"path": str(path), "num_held_out": 0}}
    plan = load_recipe(recipe_path(Path(gpu_gsm8k.RECIPE)), changed).prompt_plan()
    prepare_prompts(plan, layout)
    assert PromptTable(layout.train_prompts, seed=0).row(0).tokens.tolist() == prompt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected `first` or `second`, found ''"),
        (["first"], "expected --model and --data, or --tiny"),
        (["first", "--model", "m", "--data", "d"], "train.jsonl: expected GSM8K's rows"),
        (["first", "--settings", "seed=1 x"], "expected section.setting=value, found x"),
    ],
)
def test_wrong_gsm8k_commands_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        gsm8k_command(monkeypatch, *words)
    assert not [*tmp_path.iterdir()]
