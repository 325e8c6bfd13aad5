"""Metrics of each step, MLflow's pages and each of several rewards, as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import areal_flow
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, cli, small_arguments

pytestmark = pytest.mark.slow
REWARDS = """[
    {verifier = "tests.integration.verifiers:reward_length"},
    {verifier = "tests.integration.verifiers:batched_digits", weight = 0.25},
]"""
RECOUNTED = """
    WITH of_groups AS (
        SELECT step, submission_index, count(DISTINCT reward) = 1 AS is_flat FROM trajectories
        WHERE status = 'trained' GROUP BY ALL
    )
    SELECT stddev_samp(reward) AS "rollout/reward_std",
           avg((finish_reason = 'length')::INT) AS "rollout/truncated_fraction",
           quantile_cont(num_tokens, 0.1) AS "rollout/completion_p10_tokens",
           quantile_cont(num_tokens, 0.5) AS "rollout/completion_p50_tokens",
           quantile_cont(num_tokens, 0.9) AS "rollout/completion_p90_tokens",
           avg(reward_parts[1].reward) AS "reward/reward_length_mean",
           avg(reward_parts[2].reward) AS "reward/batched_digits_mean",
           (SELECT avg(is_flat::INT) FROM of_groups WHERE step = $step)
               AS "rollout/zero_variance_groups_fraction"
    FROM trajectories WHERE status = 'trained' AND step = $step
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a user trained with two rewards, on two trainer ranks."""
    cwd = tmp_path_factory.mktemp("metrics")
    chosen = ("--rewards", REWARDS, "--cluster.num-trainers", "2", "--tracking.enabled", "true")
    arguments = [*small_arguments(), *chosen, "--num-steps", "2"]
    done = cli("train", "--name", "two", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batched_digits, tried on the first row: 1 for its answer" in done.stdout
    assert "no reward for an empty one" in done.stdout
    return cwd


@pytest.fixture(scope="module")
def run(workspace: Path) -> areal_flow.Run:
    return areal_flow.open_run(workspace / "runs" / "two")


def test_metrics_of_a_step_are_those_of_its_trajectories(run: areal_flow.Run) -> None:
    steps = run.steps("arrow", where="step > 0").to_pylist()
    with_difficulty = run.database().sql(
        "SELECT step, difficulty, avg(passed::INT) FROM trajectories "
        "WHERE status = 'trained' GROUP BY ALL"
    )
    rates = {(step, f"pass_rate/difficulty_{d}"): r for step, d, r in with_difficulty.fetchall()}
    for row in steps:
        relation = run.database().sql(RECOUNTED, params={"step": row["step"]})
        (recounted,) = relation.to_arrow_table().to_pylist()
        recounted |= {name: rate for (step, name), rate in rates.items() if step == row["step"]}
        assert {name: row[name] for name in recounted} == pytest.approx(recounted)
        assert row["entropy_mean"] > 0
        assert row["speed/trainer_busy_fraction"] > 0
        generated = row["speed/generated_tokens_per_s"] * row["step_s"]
        assert generated == pytest.approx(row["num_generated_tokens"])  # 0 if all were ready before
    assert sum(row["num_generated_tokens"] for row in steps) > 0
    check_accounting(run.layout)


def test_replay_in_one_process_finds_what_two_ranks_recorded(workspace: Path, typed: Typed) -> None:
    done = typed("replay", "two", "--step", "2", "--json", cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    replay = json.loads(done.stdout)
    assert replay["within_tolerance"], "sums of two ranks have another order than those of one"
    assert replay["recorded"].keys() == replay["replayed"].keys()
    assert {"entropy_mean", "rollout/reward_std", "reward/batched_digits_mean"} <= set(
        replay["replayed"]
    )
    assert not [name for name in replay["recorded"] if name.startswith(("speed/", "system/"))]


def tracked(uri: str) -> dict[str, Any]:
    """Return the run as an MLflow server shows it."""
    from mlflow import MlflowClient

    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("areal-flow")
    (run,) = client.search_runs([experiment.experiment_id])
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    samples = json.loads(
        Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text()
    )
    versions = client.search_model_versions(f"run_id = '{run.info.run_id}'")
    own = {"areal_flow.delivered_step", "areal_flow.alias"}
    return {
        "kind": experiment.tags["mlflow.experimentKind"],
        "files": files,
        "samples": samples,
        "metrics": run.data.metrics,
        "tags": {name: value for name, value in run.data.tags.items() if name not in own},
        "inputs": [given.dataset.name for given in run.inputs.dataset_inputs],
        "rates": {v.tags["step"]: v.tags.get("rollout_pass_rate") for v in versions},
    }


def test_mlflow_shows_what_the_run_is_and_any_server_gets_the_same(
    workspace: Path, typed: Typed
) -> None:
    shown = tracked(f"sqlite:///{workspace / 'runs' / 'mlflow.db'}")
    assert shown["kind"] == "custom_model_development"
    assert shown["files"] == {"recipe.toml", "samples.json", "report.html"}
    assert {"policy_version", "prompt", "completion"} <= set(shown["samples"]["columns"])
    for role in ("driver", "generator", "reward", "trainer"):
        assert shown["metrics"][f"system/{role}_memory_usage_megabytes"] > 10
    assert "reward/batched_digits_mean" in shown["metrics"]
    assert "batched_digits@" in shown["tags"]["verifier"]
    assert shown["tags"]["recipe"] == "arithmetic"
    assert shown["inputs"] == ["prompts"]
    assert shown["rates"]["2"]
    server = f"sqlite:///{workspace / 'server' / 'mlflow.db'}"
    (workspace / "other").mkdir()
    done = typed("track", "two", "--to", server, cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert tracked(server) == shown


def test_each_reward_is_shown_with_its_trajectory_and_in_the_report(
    workspace: Path, run: areal_flow.Run, typed: Typed
) -> None:
    shown = typed("trajectories", "two", "--show", "1", cwd=workspace).stdout
    assert "before weights: tests.integration.verifiers:reward_length " in shown
    page = run.layout.report.read_text()
    for title in ("Rewards before their weights", "Pass rate by difficulty", "Entropy"):
        assert f"<h3>{title}" in page
