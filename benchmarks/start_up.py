"""The start of the default job: seconds until each thing that it says, and until its first step.

    python benchmarks/start_up.py [--rounds 3] [--command "nox -s train --"] [--json FILE]

Each round starts the job in a new folder and kills it once it has taken steps of supervised
fine-tuning. The first step begins when the first count is said, less what it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic

import psutil
from rich.console import Console
from rich.table import Table

from areal_flow.cluster.trainer_tasks import SFT_CHUNK_S

ROOT = Path(__file__).parents[1]
SAID = {
    "prepared": "Run ",
    "workers start": "Starting ",
    "workers joined": "Dask dashboard: ",
    "trainer asked": "Making the first policy",
    "first step": "supervised fine-tuning ",
}
"""How the line begins that says so."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--command", default=f"{sys.executable} -m pipelines.cli.main train")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rounds = [measure(shlex.split(arguments.command)) for _ in range(arguments.rounds)]
    table = Table(title=f"Seconds from the start of `{arguments.command.rpartition('/')[2]}`")
    for label in (*rounds[0], "load"):
        table.add_column(label, justify="right")
    for found in (*rounds, {name: median(each[name] for each in rounds) for name in rounds[0]}):
        table.add_row(
            *(f"{seconds:.1f}" for seconds in found.values()), f"{os.getloadavg()[0]:.1f}"
        )
    Console(width=120).print(table, "The last row is the median.")
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=2) + "\n")


def measure(command: list[str]) -> dict[str, float]:
    """Return the seconds until each thing was said, and the processor seconds of all processes."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-start-") as scratch:
        began = monotonic()
        driver = subprocess.Popen(
            [*command, "--runs", scratch],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            return _listen(driver, began)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)


def _listen(driver: subprocess.Popen[str], began: float) -> dict[str, float]:
    found: dict[str, float] = {}
    assert driver.stdout is not None
    for line in driver.stdout:
        for name, beginning in SAID.items():
            if name not in found and line.strip().startswith(beginning):
                found[name] = monotonic() - began
        if "first step" in found:
            found["first step"] -= SFT_CHUNK_S
            return found | {"processor": _processor_s(driver.pid)}
    raise SystemExit(f"expected steps of supervised fine-tuning, found the end: {driver.wait()}")


def _processor_s(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
