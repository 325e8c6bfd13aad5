"""What a user got wrong is found before a cluster starts, and said once and by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_flow.config import dump_recipe
from areal_flow.errors import RewardError
from areal_flow.layout import RunLayout
from areal_flow.recovery.run_directory import create_run
from pipelines.preflight import try_verifiers
from pipelines.train import prepare_run
from tests.integration.runs import cli, small_arguments, small_recipe
from tests.policies import write_model_directory

VERIFIERS = """
import os, sys, threading, time

def raises(completion, answer):
    return inner({})

def inner(table):
    return table["nothing"]

def needs_tests(completion, tests):
    return 1.0

def exits(completion):
    os._exit(3)

def exits_by_sys(completion):
    sys.exit(3)

def hangs(completion):
    threading.Event().wait()

def returns_nothing(completion):
    pass

async def holds_the_loop(completion):
    time.sleep(60)

def fails_on_nothing(completion):
    return len(completion) / len(completion)

def fails_at_times(completion):
    if len(completion) % 3 == 2:
        raise ValueError("no verdict")
    return len(completion) / 8

def is_slow(completion):
    time.sleep(1.0)
    return 1.0
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return a run that is prepared and not started."""
    layout = RunLayout(tmp_path_factory.mktemp("runs") / "r")
    create_run(layout, small_recipe())
    prepare_run(layout, small_recipe())
    return layout


def test_verifier_that_raises_is_refused_before_the_cluster_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(VERIFIERS)
    rewards = '[{verifier = "own:raises"}]'
    done = cli("train", *small_arguments(), "--rewards", rewards, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "areal-flow: rewards.verifier = 'own:raises' fails on the first prompt" in done.stderr
    assert "'nothing' (at inner, own.py, line 8)" in done.stderr
    assert done.stderr.count('return table["nothing"]') == 1
    assert "rewards/function.py" not in done.stderr
    assert "Dask" not in done.stdout
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        ("needs_tests", "asks for 'tests'; it may ask, by name, for prompt, completion, answer,"),
        ("exits", "exits (status 3) on the first prompt row, instead of returning a reward"),
        ("exits_by_sys", "called sys.exit(3): it must return a reward (at exits_by_sys, own.py"),
        ("hangs", "no verdict on a completion within 0.5 s, it stands in hangs, own.py, line 20"),
        ("returns_nothing", "returned None, expected a number or a Score"),
        ("holds_the_loop", "no verdict on a completion within 0.5 s, it stands in holds_the_loop"),
    ],
)
def test_what_is_wrong_with_a_verifier_is_named(
    tmp_path: Path,
    prepared: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
    verifier: str,
    said: str,
) -> None:
    monkeypatch.setattr("pipelines.preflight.START_TIMEOUT_S", 6.0)
    with pytest.raises(RewardError) as raised:
        tried(tmp_path, prepared, monkeypatch, verifier)
    assert said in str(raised.value)


def test_verifier_that_works_is_shown_with_its_rewards_and_its_time(
    tmp_path: Path, prepared: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = tried(tmp_path, prepared, monkeypatch, "fails_on_nothing")
    assert "own:fails_on_nothing, tried on the first row: 1 for its answer as the" in line
    assert "an error for an empty one; " in line
    (line,) = tried(tmp_path, prepared, monkeypatch, "is_slow", timeout_s=5.0)
    assert "32 completions of a step take 32 s on 1 reward worker(s): raise" in line


def tried(
    folder: Path,
    layout: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
    verifier: str,
    *,
    timeout_s: float = 0.5,
) -> list[str]:
    (folder / "own.py").write_text(VERIFIERS)
    monkeypatch.syspath_prepend(str(folder))
    recipe = small_recipe(rewards=[{"verifier": f"own:{verifier}", "timeout_s": timeout_s}])
    layout.config.write_text(dump_recipe(recipe))
    return try_verifiers(layout, recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_that_is_not_there_is_refused_with_nothing_left_behind(tmp_path: Path) -> None:
    done = cli("sft", "--trainer.device", "cuda", "--cluster.num-gpus", "8", cwd=tmp_path)
    assert done.returncode == 2
    assert "trainer.device = 'cuda': expected CUDA, found none that torch" in done.stderr
    assert "--resume" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_stop_token_that_no_tokenizer_has_is_refused_with_nothing_left_behind(
    tmp_path: Path,
) -> None:
    done = cli("train", *small_arguments(), "--generation.stop.token-ids", "[4711]", cwd=tmp_path)
    assert done.returncode == 1
    assert "generation.stop.token_ids: expected tokens of the model, found 4711" in done.stderr
    assert not [*(tmp_path / "runs").glob("*")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return where a model directory was trained, and what that printed to both streams."""
    folder = tmp_path_factory.mktemp("trained")
    model = write_model_directory(folder / "model")
    (folder / "own.py").write_text(VERIFIERS)
    done = cli(
        *("train", "--name", "r", *small_arguments(), "--model", model, "--sft.num-steps", "0"),
        *("--num-steps", "2", "--prompts.num-held-out", "32", "--generation.max-model-len", "64"),
        *("--rewards", '[{verifier = "own:fails_at_times"}]'),
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout, done.stderr


def test_failure_is_printed_once_and_then_counted(trained: tuple[Path, str, str]) -> None:
    _, said, warned = trained
    assert "Verifier own:fails_at_times, tried on the first row: " in said
    assert warned.count('raise ValueError("no verdict")') == 1
    assert "a verifier failed 10 times so far: ValueError in fails_at_times, own.py, line" in warned
    assert len(warned.splitlines()) < 30, warned


def test_output_has_no_bars_of_libraries_and_no_stage_that_was_not(
    trained: tuple[Path, str, str],
) -> None:
    _, said, warned = trained
    assert "Loading weights" not in said + warned
    assert "fine-tuning" not in said
    assert "2 steps in " in said


def test_evaluation_says_what_it_does_and_of_what(trained: tuple[Path, str, str]) -> None:
    folder, _, _ = trained
    done = cli("evaluate", "r", "--num-prompts", "8", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Evaluating r (step 2 of run r) on 8 held-out prompts" in done.stderr
    assert "answered 8/8" in done.stderr
    assert "r (step 2 of run r): held-out prompts, one sample each" in done.stdout
    assert "00000002" not in done.stdout


def test_exported_files_can_be_read_by_others(trained: tuple[Path, str, str]) -> None:
    folder, _, _ = trained
    done = cli("export", "r", "plain", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "touched").touch()
    usual = (folder / "touched").stat().st_mode
    assert {path.name: path.stat().st_mode for path in (folder / "plain").iterdir()} == {
        path.name: usual for path in (folder / "plain").iterdir()
    }


def test_model_that_nobody_registered_leaves_no_registry(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = cli("evaluate", "models:/areal-flow@current", cwd=tmp_path)
    assert done.returncode == 1
    assert "expected a registry at sqlite:///" in done.stderr
    assert "found none" in done.stderr
    assert not list(tmp_path.rglob("*.db"))
