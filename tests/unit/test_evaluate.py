"""The settings of evaluations, and which models can be compared; without a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipelines.jobs.evaluate
from areal_flow.cluster.placement import place_workers
from areal_flow.config import build_recipe, dump_recipe
from areal_flow.core.errors import ConfigError, ModelError
from areal_flow.core.layout import RunLayout
from pipelines.cli.main import main
from pipelines.jobs.evaluate import _recipe, _require_alike, _scratch_directory, evaluate_all
from tests.policies import write_model_directory
from tests.tracked_runs import make_bare_run

MakeRun = Callable[..., RunLayout]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str, *, verifier: str = "v@1", **settings: Any) -> RunLayout:
        recipe = build_recipe(settings, source="test")
        layout = make_bare_run(tmp_path / name, dump_recipe(recipe))
        inputs = {"verifiers": [[1, verifier]], "files": {}, "model": {}, "sources": {}}
        layout.inputs.write_text(json.dumps(inputs))
        return layout

    return make


def test_machine_that_trained_a_run_has_gpus_enough_to_evaluate_it(make_run: MakeRun) -> None:
    on_gpu = {"device": "cuda"}
    run = make_run(
        "r", trainer=on_gpu, generation=on_gpu, cluster={"num_gpus": 2, "num_generators": 1}
    )
    workers = place_workers(_recipe(run, (), {}))
    assert [worker.role for worker in workers if worker.num_gpus] == ["generator"]


def test_models_on_a_cpu_are_evaluated_by_two_generators_by_default(make_run: MakeRun) -> None:
    run = make_run("r", cluster={"num_generators": 1})
    assert _recipe(run, (), {}).cluster.num_generators == 2
    assert _recipe(run, (), {"cluster": {"num_generators": 1}}).cluster.num_generators == 1


def test_workers_on_other_machines_see_the_files_of_an_evaluation(make_run: MakeRun) -> None:
    for settings, is_in_run in (({}, False), ({"launcher": "ssh"}, True)):
        run = make_run(f"r{is_in_run}")
        hosts = {"remote": {"hosts": ["a"], "python": "python3"}} if is_in_run else {}
        network = {"network": {"host": "10.0.0.1"}} if is_in_run else {}
        recipe = build_recipe({}, source="test")
        cluster = recipe.cluster.model_copy(update={**settings, **hosts, **network})
        with _scratch_directory(run, recipe.model_copy(update={"cluster": cluster})) as scratch:
            assert (Path(scratch).parent == run.root) is is_in_run


def test_models_that_other_verifiers_judge_are_not_compared(make_run: MakeRun) -> None:
    numeric, exact = make_run("a"), make_run("b", rewards=[{"verifier": "exact"}])
    with pytest.raises(ConfigError, match=r"runs a and b differ in rewards: expected one verif"):
        evaluate_all([run.checkpoints / "00000000" for run in (numeric, exact)], ["a", "b"])
    with pytest.raises(ConfigError, match=r"differ in the verifier's code"):
        _require_alike([numeric, make_run("c", verifier="v@2")], (), {})
    _require_alike([numeric, make_run("d", num_steps=7, trainer={"learning_rate": 1.0})], (), {})


def test_models_with_different_sampling_are_compared_with_the_same_sampling(
    make_run: MakeRun,
) -> None:
    runs = [make_run("a"), make_run("b", generation={"temperature": 0.5})]
    with pytest.raises(ConfigError, match="differ in temperature"):
        _require_alike(runs, (), {})
    _require_alike(runs, (), {"evaluation": {"temperature": 0}})


def test_model_outside_a_run_needs_prompts_from_the_caller(tmp_path: Path) -> None:
    write_model_directory(tmp_path)
    with pytest.raises(ModelError, match=r"lies in no run: give --data FILE, in Python prompts="):
        evaluate_all([tmp_path], ["m"])
    with pytest.raises(ConfigError, match=r"give --data FILE, in Python prompts="):
        build_recipe({"prompts": {"source": "file"}}, source="test")


@pytest.mark.parametrize(
    ("text", "to", "message"),
    [
        ("\n", "answers.jsonl", "p.jsonl is empty: expected one row or more"),
        ('{"question": "1 + 1 ="}\n', "answers.jsonl", "line 1: field 'answer' is missing"),
        ('{"question": "1 + 1 =", "answer": "2"}\n', "answers.txt", "answers.txt: expected a name"),
    ],
)
def test_rows_and_target_are_refused_before_a_model_is_read(
    tmp_path: Path,
    text: str,
    to: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was read")

    monkeypatch.setattr(pipelines.jobs.evaluate, "copy_model_description", read)
    write_model_directory(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text(text)
    given = ["--data", str(tmp_path / "p.jsonl"), "--to", str(tmp_path / to)]
    assert main(["evaluate", str(tmp_path / "model"), *given]) > 0
    assert message in capsys.readouterr().err


def test_evaluate_takes_sampling_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def evaluate_all(*_: Any, **given: Any) -> list[Any]:
        calls.append(given)
        raise ConfigError("enough")

    monkeypatch.setattr(pipelines.jobs.evaluate, "evaluate_all", evaluate_all)
    (tmp_path / "config.json").write_text("{}")
    sampling = ("--temperature", "0", "--top-p", "0.9", "--max-new-tokens", "7")
    assert main(["evaluate", str(tmp_path), *sampling]) == 2
    assert calls[0]["settings"] == {
        "evaluation": {"temperature": 0, "top_p": 0.9},
        "generation": {"max_new_tokens": 7},
    }
