"""One small run, seen through every command."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, cli, small_arguments

BOUNDS = ("", "_low", "_high")
SUMMARY_KEYS = {
    "held_out_before",
    "held_out_after",
    "first_policy_s",
    "training_s",
    "total_s",
    "num_steps",
    "staleness_mean",
    "staleness_max",
    "tokens_per_second_generated",
    "tokens_per_second_trained",
    "overlap_efficiency",
    "model_version",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a user ran `areal-flow train` once."""
    cwd = tmp_path_factory.mktemp("workspace")
    rows = [json.dumps({"question": f"{n} + 90 =", "answer": str(n + 90)}) for n in range(8)]
    (cwd / "nineties.jsonl").write_text("\n".join(rows))
    sets = '[{name = "nineties", path = "nineties.jsonl"}]'
    arguments = [*small_arguments(), "--tracking.enabled", "true", "--evaluation.held-out", sets]
    done = cli("train", "--name", "first", *arguments, cwd=cwd)
    (cwd / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


@pytest.fixture(scope="module")
def layout(workspace: Path) -> RunLayout:
    return RunLayout((workspace / "runs" / "first").resolve())


def test_summary_has_the_documented_fields(layout: RunLayout) -> None:
    summary = json.loads(layout.summary.read_text())
    assert set(summary) >= SUMMARY_KEYS
    for moment in ("held_out_before", "held_out_after"):
        names = {f"{name}{end}" for name in ("pass_rate", "reward_mean") for end in BOUNDS}
        assert set(summary[moment]) == {*names, "n", "num_samples", "mean_tokens"}
        assert summary[moment]["n"] == 64 + 8
    for by_set in summary["by_set"].values():
        assert {name: scores["n"] for name, scores in by_set.items()} == {
            "held_out": 64,
            "nineties": 8,
        }
    assert summary["num_steps"] == 4
    assert summary["model_version"] == "3"
    assert summary["staleness_max"] <= 2
    assert 0 < summary["overlap_efficiency"] <= 1


def test_output_shows_progress_and_next_commands(workspace: Path) -> None:
    output = (workspace / "output.txt").read_text()
    assert "Dask dashboard: http://127.0.0.1:" in output
    for part in ("step 4/4", "pass ", "staleness", "generators busy", "trainer busy", "left"):
        assert part in output
    for command in (
        "areal-flow ui",
        'open_run("runs/first")',
        "areal-flow evaluate models:/areal-flow@first",
        "areal-flow export models:/areal-flow@first",
        "areal-flow lineage models:/areal-flow@first",
    ):
        assert command in output
    assert "Traceback" not in output


def test_tokens_add_up(layout: RunLayout) -> None:
    check_accounting(layout)


def test_lineage_from_model_version_to_prompts(workspace: Path, layout: RunLayout) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{workspace / 'runs' / 'mlflow.db'}"
    version = MlflowClient(uri, uri).get_model_version_by_alias("areal-flow", "first")
    run = areal_flow.open_run(layout.root)
    steps = run.steps()
    row = steps[steps.step == int(version.tags["step"])].iloc[0]
    assert version.tags["weights_hash"] == row.weights_hash
    used = steps[steps.step <= row.step].trajectory_ids.explode().dropna()
    joined = run.trajectories()[["trajectory_id", "prompt_id"]].merge(
        used.rename("trajectory_id"), on="trajectory_id"
    )
    assert len(joined) == len(used) > 0
    assert joined.prompt_id.nunique() > 1


def test_mlflow_has_every_step(workspace: Path, layout: RunLayout) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{workspace / 'runs' / 'mlflow.db'}"
    client = MlflowClient(uri, uri)
    (experiment,) = client.search_experiments(filter_string="name = 'areal-flow'")
    (tracked,) = client.search_runs([experiment.experiment_id])
    run_id = tracked.info.run_id
    for name in ("train/loss", "staleness/mean_versions", "rollout/reward_mean"):
        assert [m.step for m in client.get_metric_history(run_id, name)] == [1, 2, 3, 4]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["controller.batch_size"] == "32"
    (prompts,) = run.inputs.dataset_inputs
    assert prompts.dataset.name == "prompts"


def test_exported_model_is_plain_hugging_face(workspace: Path, typed: Typed) -> None:
    done = typed("export", "models:/areal-flow@first", "exported", cwd=workspace)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = workspace / "exported"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer("3 + 4 - 1 =", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("3 + 4 - 1 =")
    assert not (exported / "optimizer.safetensors").exists()
    again = typed("export", "first", "exported", cwd=workspace)
    assert again.returncode == 1
    assert "not empty" in again.stderr


@pytest.mark.walk
def test_registered_model_can_be_evaluated(workspace: Path) -> None:
    likeliest = ("--num-prompts", "40", "--temperature", "0", "--json")
    done = cli("evaluate", "models:/areal-flow@best", *likeliest, cwd=workspace)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)["overall"]
    assert scores["n"] == 40 + 8, "the first ones of each set"
    assert scores["pass_rate_low"] <= scores["pass_rate"] <= scores["pass_rate_high"]


@pytest.mark.slow
def test_run_can_be_evaluated_on_a_file(workspace: Path) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]
    (workspace / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    to = ("--against", "first@0", "--to", "answers.lance", "--json")
    done = cli("evaluate", "first", "--data", "p.jsonl", *to, cwd=workspace)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [model["n"] for model in result["models"]] == [20, 20]
    assert result["comparison"]["num_prompts"] == 20
    before, after = (model["pass_rate"] for model in result["models"])
    assert result["comparison"]["difference"] == pytest.approx(after - before)
    answers = lance.dataset(str(workspace / "answers.lance")).to_table().to_pylist()
    assert len(answers) == 40
    assert {row["model"] for row in answers} == {model["model"] for model in result["models"]}
    assert all(json.loads(row["reward_detail"]) for row in answers)


def test_version_without_a_checkpoint_is_refused_with_those_there_are(
    workspace: Path, typed: Typed
) -> None:
    done = typed("evaluate", "first@3000", cwd=workspace)
    assert done.returncode == 1
    assert "no checkpoint of version 3000, only of 0" in done.stderr


def test_runs_are_listed_with_their_state(workspace: Path, typed: Typed) -> None:
    listed = typed("runs", cwd=workspace).stdout
    assert "first" in listed
    assert "finished" in listed


def test_taken_name_is_refused(workspace: Path, typed: Typed) -> None:
    done = typed("train", "--name", "first", cwd=workspace)
    assert done.returncode == 1
    assert "--resume first" in done.stderr


@pytest.mark.slow
def test_finished_run_can_be_trained_further(workspace: Path, layout: RunLayout) -> None:
    done = cli("train", "--resume", "first", "--num-steps", "6", cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 steps replayed" in done.stdout
    assert "Resuming at step 4" in done.stdout
    check_accounting(layout)
    steps = areal_flow.open_run(layout.root).steps("arrow")
    assert sorted(steps["step"].to_pylist()) == list(range(7))
    assert set(steps["writer_epoch"].to_pylist()) == {1, 2}


def test_resumed_run_keeps_its_recipe(workspace: Path, typed: Typed) -> None:
    done = typed("train", "--resume", "first", "--trainer.learning-rate", "1", cwd=workspace)
    assert done.returncode == 2
    assert "only --num-steps and --max-minutes" in done.stderr
