"""A run whose datasets are in an object store: trained, killed, resumed, audited and replayed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal_flow
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.layout import run_layout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.dataset import open_dataset
from pipelines.jobs.job import url_of_datasets
from tests.chaos import SETTINGS
from tests.struck_run import StruckRun

moto = pytest.importorskip("moto.server")
BUCKET = "bucket"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server on loopback, set in the environment of new processes."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    try:
        yield f"s3://{BUCKET}/runs"
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_driver_loses_nothing_of_a_run_in_an_object_store(
    bucket: str, tmp_path: Path
) -> None:
    run = StruckRun(tmp_path)
    try:
        run.begin({**SETTINGS, "datasets": bucket})
        run.wait_for_steps(2, "steps")
        run.audit()
        run.kill_driver()
        run.audit()
        run.resume()
        assert run.stop() == 143
    finally:
        run.close()
    run.audit()
    url = f"{bucket}/struck/trajectories.lance"
    assert run.layout.trajectories.read_text() == url
    assert open_dataset(run.layout.trajectories).uri.removeprefix("/") in (url, url[5:])
    steps = areal_flow.open_run(run.layout.root).steps("arrow").to_pylist()
    replayed = replay_step(run.layout, step=4, from_checkpoint=0).replayed
    assert replayed.hashes.weights_hash == steps[4]["weights_hash"]
    kept = "".join(path.read_text() for path in run.layout.root.glob("*.*") if path.is_file())
    assert "secret-of-the-test" not in kept + run.log.read_text()


def test_only_datasets_can_be_in_an_object_store() -> None:
    with pytest.raises(RunError, match="only the datasets can be in an object store"):
        run_layout(Path("s3://bucket/runs"), "mine")
    with pytest.raises(ConfigError, match=r"--datasets: expected s3://BUCKET/FOLDER, found '/tmp'"):
        url_of_datasets("/tmp", "mine")
    assert url_of_datasets("s3://bucket/a/", "mine") == "s3://bucket/a/mine"
