"""These tests are there only where REAL_MODEL names SmolLM2's directory: in `nox -s real_model`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_flow.tokenizer.directory import check_model_directory

NAMED = os.environ.get("REAL_MODEL", "")
collect_ignore_glob = [] if NAMED else ["test_*.py"]


@pytest.fixture(scope="session")
def model() -> Path:
    """The directory of SmolLM2-135M-Instruct, which tests only read."""
    directory = Path(NAMED).resolve()
    check_model_directory(directory)
    return directory
