"""A short training run with vLLM's engine, by the user's command line."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

import areal_flow
from tests.integration.runs import cli, done, small_arguments


@pytest.mark.parametrize("adapter", [False, True], ids=["merged", "adapter"])
def test_run_with_vllm_trains_on_what_it_sampled_and_passes_the_audit(
    tmp_path: Path, adapter: bool
) -> None:
    chosen = ["--generation.engine", "vllm"]
    if adapter:
        chosen += [
            "--trainer.lora.rank",
            "4",
            "--generation.vllm.engine_args",
            "{enable_lora = true}",
        ]
    ended = cli("train", "--name", "v", *small_arguments(), *chosen, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run = areal_flow.open_run(tmp_path / "runs" / "v")
    steps = run.steps()
    assert list(steps.step) == [0, 1, 2, 3, 4]
    # Those who sampled and those who train compute alike: tokens that are not stale weigh 1.
    assert steps.importance_weight_mean[1] == pytest.approx(1, abs=1e-3)
    spans = chain(*run.trajectories(columns=["version_spans"]).version_spans)
    # No token of the last step is older than version 1, so new weights have arrived.
    assert {0} < {span["version"] for span in spans} <= {0, 1, 2, 3, 4}
    assert "v: clean" in done(tmp_path, "check", "v")
    assert "bit for bit" in done(tmp_path, "replay", "v", "--step", "4")
