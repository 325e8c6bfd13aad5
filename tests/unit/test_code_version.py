"""The commit of the running code: that of its own clone, not of a clone around it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from areal_flow.core.program import git_commit


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(("git", "-C", str(tmp_path), *who, *arguments), check=True)

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return tmp_path


def test_commit_is_that_of_the_clone_and_says_if_it_was_changed(clone: Path) -> None:
    commit = git_commit(clone / "package")
    assert len(commit) == 40
    (clone / "package" / "code.py").write_text("2")
    assert git_commit(clone / "package") == f"{commit}-dirty"


def test_package_that_is_installed_in_a_clone_has_no_commit(clone: Path) -> None:
    (clone / "installed").mkdir()
    (clone / "installed" / "code.py").write_text("1")
    assert git_commit(clone / "installed") == ""


def test_no_commit_without_git(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_commit(clone / "package") == ""


def test_commit_that_a_build_recorded_is_that_of_the_package(clone: Path) -> None:
    (clone / "installed" / "core").mkdir(parents=True)
    (clone / "installed" / "core" / "commit.txt").write_text("recorded\n")
    assert git_commit(clone / "installed") == "recorded"
