"""On macOS everything without a sandbox works, and what needs Linux is refused by name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from areal_flow.cluster.worker import end_with_parent
from areal_flow.core import lease, machine
from areal_flow.core.errors import ConfigError
from areal_flow.policy.weights import shared_memory
from areal_flow.policy.weights.shared_memory import check_medium
from areal_flow.rewards.math.processes import MathPool
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import require_installed
from areal_flow.sandboxes.pool import choose_tier
from areal_flow.sandboxes.run import SandboxError
from pipelines.cli.main import main

LINUX_ONLY = {
    os: ("memfd_create", "pidfd_open", "pipe2", "sched_getaffinity", "setns", "unshare"),
}


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove what only Linux has, as far as a test can."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(machine, "CGROUP_LIMITS", ())
    for module, names in LINUX_ONLY.items():
        for name in names:
            monkeypatch.delattr(module, name, raising=False)


@pytest.mark.usefixtures("macos")
def test_sandboxes_and_shared_memory_are_refused_by_name_on_macos() -> None:
    with pytest.raises(SandboxError, match=r"no sandbox .*\(this is Darwin arm64\)\. Expected"):
        choose_tier()
    with pytest.raises(ConfigError, match=r"weights\.medium = 'shared_memory': expected"):
        check_medium("shared_memory")
    check_medium("auto")


@pytest.mark.usefixtures("macos")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_is_refused_by_name_on_macos(device: str) -> None:
    settings = GenerationSettings(engine="vllm", device=device)
    with pytest.raises(
        ConfigError, match=r"'vllm': expected Linux, found Darwin arm64: use 'torch"
    ):
        require_installed(settings)


@pytest.mark.usefixtures("macos")
def test_algebra_and_workers_need_nothing_of_linux() -> None:
    assert machine.usable_cores() == os.cpu_count()
    end_with_parent(0)
    pool = MathPool()
    assert pool.ask("1/2", "0.5")[0] == "correct"
    pool._close()


@pytest.mark.usefixtures("macos")
def test_doctor_says_what_works_on_macos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["doctor"])
    output = " ".join(capsys.readouterr().out.split())
    assert "- system Darwin arm64 only on Linux: sandboxes ('code', the tool 'python')," in output
    assert "train will work here" in output


def test_stopped_driver_is_unknown_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "Path", lambda path: Path("/absent" + str(path)))
    assert not lease._is_stopped(os.getpid())


@pytest.mark.slow
def test_all_modules_are_imported_without_what_only_linux_has() -> None:
    """Module by module, in a process that has lost it."""
    deleted = "\n".join(
        f"if hasattr({module.__name__}, {name!r}): del {module.__name__}.{name}"
        for module, names in LINUX_ONLY.items()
        for name in names
    )
    program = f"""
import asyncio, os, subprocess, sys, distributed, lance, mlflow, torch, transformers
{deleted}
import pkgutil, importlib, areal_flow
for module in pkgutil.walk_packages(areal_flow.__path__, "areal_flow."):
    if not any(part in module.name for part in ("vllm", "verifiers", "__main__", "inside")):
        importlib.import_module(module.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
