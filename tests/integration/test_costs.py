"""What a real run cost: complete, the same in the command, the report and MLflow."""

from __future__ import annotations

import json

import polars as pl
import pytest
from mlflow.tracking import MlflowClient

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.flow.costs import by_use
from areal_flow.tracking.mlflow import IDENTITY_TAG, default_tracking_uri
from tests.integration.conftest import Typed
from tests.integration.runs import check_costs


def test_costs_of_a_run_add_up_to_its_devices_time(finished: RunLayout) -> None:
    run, (costs, _) = areal_flow.open_run(finished.root), check_costs(finished)
    by_role, uses = costs["by_role"], costs["by_use"]
    assert min(by_role[role]["trained"] for role in ("generator", "trainer", "reward")) > 0
    assert uses["discarded"] > 0, "some verdicts failed"
    assert uses["lost"] == 0
    of_trainer = by_role["trainer"]
    computed = pl.DataFrame(run.steps("arrow")).select(
        pl.sum_horizontal("read_s", "train_s", "stage_s").sum()
    )
    assert of_trainer["trained"] + of_trainer["masked"] == pytest.approx(computed.item(), rel=0.02)


def test_command_reports_amounts_by_use_step_and_trajectory(
    finished: RunLayout, typed: Typed
) -> None:
    runs, name = finished.root.parent, finished.name
    command = ("--json", "--runs", str(runs), "cost", name, "--price", "cpu=7200", "--steps")
    done = typed(*command, "--trajectories", "3", cwd=runs)
    assert done.returncode == 0, done.stderr
    (amounts,) = json.loads(done.stdout)["runs"]
    assert amounts["unit"] == "money"
    uses = amounts["by_use"]
    assert uses["total"] == pytest.approx(2 * check_costs(finished)[0]["by_use"]["total"])
    assert sum(uses.values()) == pytest.approx(2 * uses["total"])
    reasons = amounts["discarded_by_reason"]
    assert sum(reasons.values()) == pytest.approx(uses["discarded"])
    assert "verifier_error" in reasons
    assert [row["step"] for row in amounts["steps"]] == [1, 2, 3, 4, 5, 6]
    costs = [row["cost"] for row in amounts["trajectories"]]
    assert len(costs) == 3
    assert costs == sorted(costs, reverse=True)
    shown = typed("--runs", str(runs), "cost", name, cwd=runs)
    assert f"{name}, device seconds" in shown.stdout
    assert "Discarded, verifier_error" in shown.stdout


def test_mlflow_has_what_each_step_cost(finished: RunLayout) -> None:
    _, steps = check_costs(finished)
    client = MlflowClient(default_tracking_uri(finished.root.parent))
    identity = json.loads(finished.identity.read_text())["run_id"]
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`{IDENTITY_TAG}` = '{identity}'")
    history = client.get_metric_history(run.info.run_id, "device_seconds/trained")
    shown = {metric.step: metric.value for metric in history}
    assert shown == pytest.approx({each.step: by_use(each.accounts)["trained"] for each in steps})
    total = sum(sum(each.accounts.values()) for each in steps)
    assert run.data.metrics["device_seconds/total"] == pytest.approx(total)
