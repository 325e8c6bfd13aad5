"""A child of `multiprocessing` ends with its parent, however that ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import multiprocessing, threading, time
from child import run

def start():
    global process
    process = multiprocessing.get_context("spawn").Process(target=run)
    process.start()

if __name__ == "__main__":
    starting = threading.Thread(target=start)
    starting.start()
    starting.join()
    time.sleep(60)
"""
CHILD = """
import os, time
from areal_flow.rollout.engines.vllm.parent_watch import end_with_parent

def run():
    print(os.getpid(), flush=True)
    time.sleep(60)

{asks}
"""


@pytest.mark.parametrize("asks", ["end_with_parent()", ""])
def test_child_outlives_the_thread_that_started_it_and_not_a_kill_9_of_its_parent(
    asks: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "child.py").write_text(CHILD.format(asks=asks))
    command = [sys.executable, "program.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)
        assert child.is_running()
        parent.kill()
    try:
        gone, _ = psutil.wait_procs([child], timeout=5 if asks else 0.5)
        assert bool(gone) == bool(asks)
    finally:
        if child.is_running():
            child.kill()
