"""`areal-flow ui`: MLflow opens beside the runs, quietly, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from areal_flow.tracking.mlflow import default_tracking_uri
from areal_flow.tracking.mlflow_pages import first_page, interval_view


def test_a_value_and_its_bounds_are_one_chart_and_no_bound_has_its_own() -> None:
    bounds = {"held_out/gsm8k/pass_rate_low", "held_out/gsm8k/pass_rate_high"}
    view = interval_view({"held_out/gsm8k/pass_rate", "train/loss", "train/clip_low", *bounds})
    shown = [chart for chart in view["compareRunCharts"] if not chart.get("deleted")]
    hidden = {chart["metricKey"] for chart in view["compareRunCharts"] if chart.get("deleted")}
    (chart,) = shown
    assert chart["metricKey"] == "held_out/gsm8k/pass_rate"
    assert {*chart["selectedMetricKeys"]} == {"held_out/gsm8k/pass_rate", *bounds}
    assert hidden == bounds
    (section,) = view["compareRunSections"]
    assert section["uuid"] == chart["metricSectionId"]
    assert section["name"] == "held_out/gsm8k", "where MLflow shows other metrics of this set"


def test_reward_and_pass_rate_come_first_whatever_the_alphabet_says() -> None:
    bounds = {"held_out/pass_rate", "held_out/pass_rate_low", "held_out/pass_rate_high"}
    others = {"device_seconds/idle", "rollout/generated_tokens"}
    view = interval_view({"rollout/pass_rate", "rollout/reward_mean", *bounds, *others})
    assert [section["name"] for section in view["compareRunSections"]] == [
        "Reward and pass rate",
        "held_out",
    ]
    first = view["compareRunSections"][0]["uuid"]
    charts = [c["metricKey"] for c in view["compareRunCharts"] if c["metricSectionId"] == first]
    assert charts == ["rollout/reward_mean", "rollout/pass_rate"]
    assert view["isAccordionReordered"]


def test_database_that_cannot_be_written_is_served_without_the_view(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow takes the address for a folder, too, and makes it
    client = MlflowClient(default_tracking_uri(tmp_path))
    experiment = client.create_experiment("a", tmp_path.as_uri())
    client.create_run(experiment)
    uri = f"sqlite:///file:{tmp_path / 'mlflow.db'}?mode=ro&uri=true"
    page = first_page(MlflowClient(tracking_uri=uri, registry_uri=uri))
    assert page == f"#/experiments/{experiment}/runs?workflowType=machine_learning"
    (message,) = (record.getMessage() for record in caplog.records if record.levelname != "INFO")
    assert "readonly" in message
    assert "\n" not in message


def wait_for(url: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except URLError:
            assert time.monotonic() < deadline, f"nothing answers at {url}"
            time.sleep(0.2)


@pytest.mark.slow
def test_first_page_is_that_of_the_newest_run_and_an_interrupt_ends_all(tmp_path: Path) -> None:
    client = MlflowClient(default_tracking_uri(tmp_path))
    older, newer = (client.create_experiment(name, tmp_path.as_uri()) for name in ("a", "b"))
    client.create_run(older, start_time=1)
    client.create_run(newer, start_time=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ("-m", "pipelines.cli.main", "ui", "--runs", str(tmp_path), "--port", str(port))
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        page = wait_for(f"http://127.0.0.1:{port}/")
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    assert f"#/experiments/{newer}/runs?" in page
    assert "mlflow.sharedViewState.intervals" in client.get_experiment(newer).tags
    assert process.returncode == 130
    assert f"http://127.0.0.1:{port}/#/experiments/{newer}/runs?" in printed
    assert "GET" not in printed
    assert len(printed.splitlines()) <= 4, printed
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
