"""The tool `python`: a policy's program, with what it printed or how it failed as the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal_flow.rollout import tools
from areal_flow.rollout.tools import run_python


@pytest.fixture(scope="module", autouse=True)
def _sandboxes_end() -> Iterator[None]:
    yield
    tools._sandboxes().close()
    tools._sandboxes.cache_clear()


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("import numpy as np\nprint(np.arange(4).sum())", "6"),
        ("print(1)\nprint(1 / 0)", "ZeroDivisionError: division by zero"),
        ("print(", "SyntaxError"),
        ("raise SystemExit(3)", "Error: the program ended with 3"),
        ("while True: print('x' * 10**6)", "Error: the program printed too much"),
        ("import os; os.listdir('/home')", "Error"),
    ],
)
def test_answer_is_what_a_program_prints_or_how_it_fails(program: str, output: str) -> None:
    assert output in run_python(program)


def test_python_calls_share_no_state() -> None:
    run_python("import sys; sys.kept = 1")
    assert run_python("import sys; print(hasattr(sys, 'kept'))") == "False"
