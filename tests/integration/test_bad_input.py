"""Mistakes of users: one clear message, an exit code, and nothing half-made left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, cli, small_arguments
from tests.policies import write_model_directory

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k" / "sample.jsonl"
RECIPE = Path(__file__).parents[2] / "pipelines" / "recipes" / "gsm8k.toml"
SMALL_GSM8K = [
    *("--num-steps", "2"),
    *("--controller.batch-size", "8"),
    *("--controller.group-size", "4"),
    *("--generation.max-new-tokens", "12"),
    *("--generation.max-num-seqs", "8"),
    *("--prompts.num-held-out", "8"),
    *("--tracking.enabled", "false"),
]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("tiny", marks=pytest.mark.slow),
        pytest.param("directory", marks=pytest.mark.walk),
    ],
)
def test_gsm8k_goes_through_the_whole_path(tmp_path: Path, model: str) -> None:
    if model == "directory":
        model = str(write_model_directory(tmp_path / "model"))
    done = cli(
        "train", RECIPE, "--name", "g", "--prompts", SAMPLE, "--model", model, *SMALL_GSM8K,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    layout = RunLayout((tmp_path / "runs" / "g").resolve())
    check_accounting(layout)
    run = areal_flow.open_run(layout.root)
    assert len(run.evaluations()) == 16
    details = [json.loads(text) for text in run.trajectories().reward_detail]
    assert {detail["verdict"] for detail in details} <= {"correct", "incorrect", "parse_error"}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (
            [str(RECIPE), "--prompts", "absent.jsonl"],
            1,
            "a file or folder of rows at absent.jsonl, found none",
        ),
        (["--prompts", "absent.jsonl"], 1, "a file or folder of rows at absent.jsonl, found none"),
        (["arithmetic", "--prompts", "mine.jsonl"], 2, "see the gsm8k recipe"),
        (["--controller.max-staleness", "-1"], 2, "--controller.max-staleness = -1"),
        (["--name", "../outside"], 1, "run name '../outside'"),
        (["--resume", "nobody"], 1, "expected a run named 'nobody' in runs, found: none"),
        (["--model", "no/such/model"], 1, "expected a model directory or a hub name"),
        (["--rewards", '[{verifier = "nonsense"}]'], 1, "rewards.verifier = 'nonsense'"),
        (
            ["--rewards", '[{verifier = "reward_model", settings = {path = "./absent"}}]'],
            1,
            "reward 'reward_model', path = './absent': expected a model directory",
        ),
        (["no-such-recipe.toml"], 2, "expected a recipe at no-such-recipe.toml"),
    ],
)
def test_wrong_argument_is_explained(
    tmp_path: Path, typed: Typed, arguments: list[str], code: int, expected: str
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    done = typed("train", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_malformed_line_17_is_named_and_the_name_stays_free(tmp_path: Path, typed: Typed) -> None:
    lines = SAMPLE.read_text().splitlines(keepends=True)[:30]
    lines[16] = lines[16][:40] + "\n"
    (tmp_path / "p.jsonl").write_text("".join(lines))
    arguments = ["train", RECIPE, "--name", "n", "--prompts", "p.jsonl", *SMALL_GSM8K]
    done = typed(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "p.jsonl, line 17: not valid JSON" in done.stderr
    assert not (tmp_path / "runs" / "n").exists()


def test_model_directory_without_a_tokenizer(tmp_path: Path, typed: Typed) -> None:
    model = write_model_directory(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    done = typed("train", "--model", model, *small_arguments(), cwd=tmp_path)
    assert done.returncode == 1
    assert "has no tokenizer.json: save a fast tokenizer" in done.stderr


def test_a_port_in_use_is_refused(tmp_path: Path, typed: Typed) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = typed(
            "train", *small_arguments(), "--cluster.dashboard-port", str(port), cwd=tmp_path
        )
    assert done.returncode == 2
    assert f"cluster.dashboard_port = {port}: the port cannot be used" in done.stderr
    assert not list((tmp_path / "runs").glob("*")), "nothing was started"


@pytest.mark.slow
def test_verifier_that_always_raises_stops_the_run_with_the_root_cause(tmp_path: Path) -> None:
    # On the right answer, with which it is tried before a run, it does not.
    (tmp_path / "broken.py").write_text(
        "def verify(*, prompt, completion, answer):\n    return 1 / (completion == answer)\n"
    )
    done = cli(
        "train", "--name", "v", *small_arguments(), "--prompts.num-held-out", "0",
        "--rewards", '[{verifier = "broken:verify"}]', cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "groups in a row failed" in done.stderr
    assert "ZeroDivisionError: division by zero (at verify, broken.py, line 2)" in done.stderr
    assert (
        "train --resume v\nIf you change the verifier or agent before resuming, add "
        "--accept-verifier (in" in done.stderr
    )
    # Once as it is tried with an empty completion, and once by the one reward worker.
    assert done.stderr.count("return 1 / (") == 2, done.stderr
    stored = areal_flow.open_run(tmp_path / "runs" / "v").trajectories()
    failed = stored[stored.reward.isna()]
    assert len(failed) > len(stored) // 2
    assert failed.reward_detail.str.contains("ZeroDivisionError").all()


@pytest.mark.walk
def test_judge_that_is_down_stops_the_run_with_the_cause_and_every_completion_is_kept(
    tmp_path: Path,
) -> None:
    judge = '[{verifier = "judge", settings = {url = "http://127.0.0.1:9", num_retries = 0}}]'
    done = cli(
        "train", "--name", "j", *small_arguments(), "--prompts.num-held-out", "0",
        "--rewards", judge, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "groups in a row failed" in done.stderr
    assert "http://127.0.0.1:9: ClientConnectorError" in done.stderr
    layout = RunLayout((tmp_path / "runs" / "j").resolve())
    stored = areal_flow.open_run(layout.root).trajectories()
    assert len(stored) > 0
    assert stored.reward.isna().all()
    assert stored.reward_detail.str.contains('"infrastructure_error"').all()
    assert stored.output_tokens.map(len).gt(0).all()
    check_accounting(layout)
