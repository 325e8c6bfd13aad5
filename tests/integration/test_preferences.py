"""`areal-flow dpo` and `reward-model`: killed and resumed bit for bit, registered, exported."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import sleep

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_flow.core.layout import RunLayout
from areal_flow.log.inputs import read_inputs
from areal_flow.policy.checkpoints import list_checkpoints, read_checkpoint_state
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.tracking.mlflow import default_tracking_uri, registered_version
from areal_flow.training.supervised import read_metrics
from tests.integration.runs import cli, started_cli

pytestmark = pytest.mark.slow

NUM_STEPS = 120
ROWS = [
    {"prompt": f"{n} + {n} =", "chosen": f" #### {2 * n}", "rejected": f" #### {2 * n + 1}"}
    for n in range(50)
]
ARGUMENTS = [
    *("--data", "pairs.jsonl", "--sft.num-steps", str(NUM_STEPS), "--sft.batch-size", "16"),
    *("--sft.learning-rate", "1e-3", "--sft.checkpoint-every-steps", "20"),
    *("--sft.num-held-out", "8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a policy learned preferences without interruption."""
    cwd = tmp_path_factory.mktemp("preferences")
    (cwd / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = cli("dpo", "--name", "straight", *ARGUMENTS, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out accuracy" in done.stdout
    return cwd


def test_killed_and_resumed_makes_the_same_bits_and_metrics(folder: Path) -> None:
    straight, killed = (RunLayout(folder / "runs" / name) for name in ("straight", "killed"))
    arguments = [*ARGUMENTS, "--tracking.enabled", "false"]
    with started_cli("dpo", "--name", "killed", *arguments, cwd=folder) as process:
        while not list_checkpoints(killed.sft_checkpoints):
            assert process.poll() is None
            sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert NUM_STEPS not in list_checkpoints(killed.sft_checkpoints)
    done = cli("dpo", "--resume", "killed", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [run.sft_checkpoints / f"{NUM_STEPS:08d}" for run in (straight, killed)]
    hashes = [read_checkpoint_state(path).weights_hash for path in results]
    assert hashes[0] == hashes[1]
    assert read_metrics(straight) == read_metrics(killed)
    assert [row["step"] for row in read_metrics(killed)] == [*range(1, NUM_STEPS + 1)]


def test_policy_is_registered_with_the_rows_that_it_learned(folder: Path) -> None:
    layout = RunLayout((folder / "runs" / "straight").resolve())
    uri = default_tracking_uri(folder / "runs")
    version = registered_version(uri, "models:/areal-flow@straight")
    assert version.source == layout.sft_checkpoints / f"{NUM_STEPS:08d}"
    assert version.tags["weights_hash"] == read_checkpoint_state(version.source).weights_hash
    assert version.tags["rows_hash"] == read_inputs(layout).files["sft/rows.npz"]
    assert version.tags["rows"].endswith("pairs.jsonl")


def test_reward_model_is_exported_as_transformers_loads_it(folder: Path) -> None:
    """On its own command line, from the policy that learned the same preferences."""
    policy = RunLayout((folder / "runs" / "straight").resolve()).sft_checkpoints
    given = ["--model", str(policy / f"{NUM_STEPS:08d}"), "--tracking.enabled", "false"]
    arguments = [*ARGUMENTS, *given]
    done = cli("reward-model", "--name", "judge", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train --model" not in done.stdout
    exported = cli("export", "judge", "rewards", cwd=folder)
    assert "AutoModelForSequenceClassification" in exported.stdout
    model = AutoModelForSequenceClassification.from_pretrained(folder / "rewards")
    tokenizer = tokenizer_of(folder / "rewards")
    tokenizer.enable_padding(pad_id=model.config.pad_token_id)
    trained = ROWS[: len(ROWS) - 8]
    texts = [row["prompt"] + row[field] for row in trained for field in ("chosen", "rejected")]
    encoded = tokenizer.encode_batch(texts)
    ids, mask = (
        torch.tensor([getattr(e, attribute) for e in encoded])
        for attribute in ("ids", "attention_mask")
    )
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
    assert (scores[0::2] > scores[1::2]).float().mean() > 0.9
