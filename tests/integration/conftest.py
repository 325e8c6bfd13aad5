"""Shared fixtures: one finished run, and commands that run in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from filelock import FileLock

from areal_flow.core.layout import RunLayout
from pipelines.cli.main import main
from tests.integration.runs import run_small, small_recipe

Typed = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run of six steps that tests only read, or copy.

    It has a gradient in every step, truncations, interruptions, verifier errors and trajectories
    that still wait. The first of pytest's processes that needs it trains it for all.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    root, trained = folder / "shared" / "runs" / "small", folder / "shared" / "trained"
    with FileLock(folder / "shared.lock"):
        if not trained.exists():
            recipe = small_recipe(
                num_steps=6,
                prompts={"num_held_out": 8},
                # Large batches in small micro-batches: the generator runs ahead of the trainer.
                controller={"batch_size": 64},
                trainer={"tokens_per_micro_batch": 32, "learning_rate": 2e-3},
                weights={"medium": "directory"},
                rewards=[{"verifier": "tests.integration.verifiers:length_that_raises_at_times"}],
                tracking={"enabled": True},
            )
            run_small(root, recipe)
            trained.touch()
    return RunLayout(root.resolve())


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Run `areal-flow` in this process: fast, for commands that start no cluster."""

    def run_command(*arguments: str | Path, cwd: Path) -> CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        capsys.readouterr()
        code = main([*map(str, arguments)])
        return CompletedProcess(arguments, code, *capsys.readouterr())

    return run_command
