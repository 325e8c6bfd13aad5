"""The wheel has the code, the recipes and the pages of this clone, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePath
from zipfile import ZipFile

import pytest

from areal_flow.core.program import VERSION, git_commit
from benchmarks.harness import ROOT

PACKAGES = ("areal_flow", "pipelines", "schemas")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZipFile:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    return ZipFile(tmp_path / build.build_wheel(str(tmp_path)))


def test_wheel_has_every_file_of_the_packages_and_no_other(wheel: ZipFile) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    contents = {*wheel.namelist()}
    described = {name for name in contents if name.startswith(f"areal_flow-{VERSION}.dist-info/")}
    assert contents - described - {"areal_flow/core/commit.txt"} == {*listed.stdout.split()}
    assert {PurePath(name).suffix for name in contents - described} == {
        *(".py", ".toml", ".html", ".css", ".sql", ".yaml", ".txt")
    }


def test_wheel_names_its_version_its_commit_and_the_program(wheel: ZipFile) -> None:
    recorded = wheel.read("areal_flow/core/commit.txt").decode().strip()
    assert recorded == git_commit(ROOT / "areal_flow")
    described = f"areal_flow-{VERSION}.dist-info"
    assert f"\nVersion: {VERSION}\n" in wheel.read(f"{described}/METADATA").decode()
    assert b"areal-flow = areal_flow.__main__:main" in wheel.read(f"{described}/entry_points.txt")
