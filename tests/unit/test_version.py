"""`areal-flow --version` says what a bug report needs."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_flow
from pipelines.cli.main import main
from pipelines.cli.version import installed_extras

METADATA = """Metadata-Version: 2.4
Name: areal-flow
Version: 0.1.0
Requires-Dist: torch>=2.13
Provides-Extra: gguf
Requires-Dist: gguf>=0.19; extra == 'gguf'
Requires-Dist: Accelerate_It>=1.1; extra == 'gguf'
Provides-Extra: vllm
Requires-Dist: vllm==0.32.0; extra == 'vllm'
Requires-Dist: pywin32; sys_platform == 'win32' and extra == 'vllm'
"""


@pytest.fixture
def _described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "areal_flow-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_described")
@pytest.mark.parametrize(
    ("installed", "extras"),
    [
        ({}, []),
        ({"gguf": "0.19.0"}, []),
        ({"gguf": "0.18.0", "accelerate-it": "1.1"}, []),
        ({"gguf": "0.20rc1", "accelerate-it": "1.1"}, ["gguf"]),
        ({"vllm": "0.31.0"}, []),
        ({"vllm": "0.32.0+cu130"}, ["vllm"]),
    ],
)
def test_extra_is_installed_if_all_its_packages_are_in_fitting_versions(
    installed: dict[str, str], extras: list[str]
) -> None:
    assert installed_extras(installed) == extras


def test_version_names_the_commit_python_torch_and_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipelines.cli.version.git_commit", lambda: "1234abc-dirty")
    assert main(["--version"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"areal-flow {areal_flow.__version__}"
    assert [line.split()[0] for line in lines] == ["commit", "python", "torch", "extras"]
    assert lines[0] == "commit     1234abc-dirty"
    assert lines[2].split()[1].startswith("2.13")
