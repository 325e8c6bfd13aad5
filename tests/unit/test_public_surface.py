"""What a user imports, and what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import areal_flow

HEAVY = ("torch", "distributed", "lance", "mlflow", "transformers", "pandas")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names() -> None:
    assert areal_flow.__all__ == ["Run", "evaluate", "open_run", "report", "sft", "train"]
    for name in areal_flow.__all__:
        assert getattr(areal_flow, name).__doc__
    assert {n for n in dir(areal_flow) if not n.startswith("_")} == set(areal_flow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = areal_flow.nothing


def test_package_runs_as_the_command_line() -> None:
    command = [sys.executable, "-m", "areal_flow", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"areal-flow {areal_flow.__version__}"


def test_import_loads_no_vendor() -> None:
    assert not modules_after("import areal_flow") & set(HEAVY)


def test_command_line_loads_no_vendor_until_a_command_needs_it() -> None:
    assert not modules_after("import pipelines.cli.main") & set(HEAVY)


def test_driver_and_reward_workers_never_import_torch() -> None:
    loaded = modules_after(
        "import pipelines.jobs.train, pipelines.pages.report, areal_flow.cluster.reward_tasks"
    )
    assert "distributed" in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded


@pytest.mark.slow
def test_policies_are_loaded_without_parts_that_language_models_do_not_need() -> None:
    unneeded = {"sklearn", "scipy"}
    trained = "from areal_flow.policy.models import policy; from areal_flow.training import rank"
    assert not modules_after(trained) & unneeded
    assert unneeded <= modules_after(f"{trained}; import sklearn, scipy, accelerate")


@pytest.mark.parametrize("package", ["pipelines", "schemas"])
def test_package_of_a_script_that_hides_ours_is_named(tmp_path: Path, package: str) -> None:
    hiding = tmp_path / package / "__init__.py"
    hiding.parent.mkdir()
    hiding.touch()
    (tmp_path / "script.py").write_text("import areal_flow\nareal_flow.open_run\n")
    clone = str(Path(areal_flow.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "PYTHONPATH": clone},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    *_, message = done.stderr.strip().splitlines()
    assert message.startswith(f"ImportError: {hiding} hides the package {package!r}")
    assert message.endswith("rename yours, or move the script")
