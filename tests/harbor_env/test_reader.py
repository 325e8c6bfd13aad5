"""Our reader of tasks and that of Harbor's own package agree; run by `nox -s tests_harbor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.sandboxes.harbor import HarborTask, TaskError, task_folders
from areal_flow.sandboxes.registry import SandboxSettings
from tests.harbor_tasks import write_task

Task = pytest.importorskip("harbor.models.task.task").Task
OLD_SIZES = {"memory_mb = 256": 'memory = "2G"', "storage_mb = 64": 'storage = "512M"'}


def rewrite(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def agrees(folder: Path) -> None:
    ours, theirs = HarborTask(folder), Task(folder)
    settings = ours.settings(SandboxSettings(provider="docker"))
    environment = theirs.config.environment
    assert ours.instruction == theirs.instruction.strip()
    assert settings.memory_bytes == environment.memory_mb * 2**20
    assert settings.disk_bytes == environment.storage_mb * 2**20
    assert ours.agent_timeout_s == theirs.config.agent.timeout_sec
    assert ours.test_timeout_s == theirs.config.verifier.timeout_sec
    assert settings.workdir == (environment.workdir or "")
    assert ours.has_solution == theirs.paths.solve_path.exists()
    assert Task.is_valid_dir(folder)


def test_both_read_the_same(tmp_path: Path) -> None:
    agrees(write_task(tmp_path / "new"))
    old = write_task(tmp_path / "old", solution="")
    rewrite(old / "task.toml", OLD_SIZES | {'schema_version = "1.1"': 'version = "1.0"'})
    rewrite(old / "instruction.md", {"Write": "<!-- harbor-canary GUID 1 -->\n# canary\n\nWrite"})
    agrees(old)
    other = write_task(tmp_path / "other", config='workdir = "/srv"\n')
    agrees(other)
    assert task_folders(tmp_path) == [tmp_path / "new", old, other]


@pytest.mark.parametrize(
    "changes", [{"test": ""}, {"config": "memory_mb = 7\n"}, {"config": 'env = "text"\n'}]
)
def test_both_refuse_the_same(tmp_path: Path, changes: dict[str, str]) -> None:
    folder = write_task(tmp_path / "bad", **changes)
    with pytest.raises(TaskError):
        HarborTask(folder)
    assert not Task.is_valid_dir(folder)
