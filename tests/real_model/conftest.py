"""These tests are there only where REAL_MODEL names SmolLM2's directory: in `nox -s real_model`;
those of vLLM in `nox -s tests_vllm`.

What they measure is printed at the end as `docs/benchmarks.md` has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal_flow.policy.tokenizer.directory import check_model_directory
from benchmarks.harness import machine_text, markdown

NAMED = os.environ.get("REAL_MODEL", "")
IGNORED = "test_vllm_*.py" if NAMED else "test_*.py"
collect_ignore_glob = [] if NAMED and find_spec("vllm") else [IGNORED]
FIGURES: list[dict[str, object]] = []


@pytest.fixture(scope="session")
def model() -> Path:
    """The directory of SmolLM2-135M-Instruct, which tests only read."""
    directory = Path(NAMED).resolve()
    check_model_directory(directory)
    return directory


@pytest.fixture(scope="session")
def figure() -> Callable[[str, str, object], None]:
    """Takes a part of the product, what was measured with its unit, and the number or text."""

    def keep(part: str, measured: str, value: object) -> None:
        FIGURES.append({"part": part, "measured": measured, "value": value})

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("figures")
        title = f"SmolLM2-135M-Instruct ({machine_text(cores=os.cpu_count() or 1)})"
        terminalreporter.write_line(markdown({title: FIGURES}))
