"""A pool of containers as SandboxFusion's protocol has it, on loopback: it isolates nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_code(asked: dict[str, Any], *, folder: str = "") -> dict[str, Any]:
    """Run a program of a test as the pool's container would.

    Args:
        folder: what all programs share for their files, if they do.
    """
    assert (asked["path"], asked["language"]) == ("/run_code", "python")
    with tempfile.TemporaryDirectory() as own:
        source = Path(own) / "program.py"
        source.write_text(asked["code"])
        try:
            done = subprocess.run(
                [sys.executable, str(source)], capture_output=True, check=False, cwd=own,
                env={"TMPDIR": folder or own}, timeout=asked["run_timeout"],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return answer("Failed", status="TimeLimitExceeded", return_code=None)
    stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    status = "Failed" if done.returncode else "Success"
    return answer(status, return_code=done.returncode, stdout=stdout, stderr=stderr)


def answer(of_all: str = "Success", **result: Any) -> dict[str, Any]:
    """Return what the pool says of a run."""
    found = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""} | result
    return {"status": of_all, "message": "", "compile_result": None, "run_result": found}
