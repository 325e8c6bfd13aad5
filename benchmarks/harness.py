"""What benchmarks share: options, rounds, child processes, runs of `areal-flow`, tables and JSON.

Light to import, since measured processes import it: their peak memory counts their imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import floor, isfinite, log10
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, perf_counter, sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import psutil
from rich.console import Console
from rich.table import Table

import areal_flow
from areal_flow.config import load_recipe
from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout

if TYPE_CHECKING:
    from areal_flow.log.queries import Run

ROOT = Path(__file__).parents[1]
CLI = (sys.executable, "-m", "pipelines.cli.main")
RECIPE = "arithmetic"
"""The default job's."""
DRIVER_LOG = "driver.log"

Way = TypeVar("Way")
Result = TypeVar("Result")


def parse_options(
    doc: str | None,
    arguments: Sequence[str] | None = None,
    /,
    *,
    choices: Any = None,
    **defaults: Any,
) -> argparse.Namespace:
    """Read the command line, or these arguments; `--json FILE` is an option of every benchmark.

    A list is the default of an option with several values, `False` of a switch; a type stands for
    an option of that type without a default. The first line of `doc` describes the command, and
    `choices` are the values that an option takes, by its name.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, default in {**defaults, "json": Path}.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
            continue
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        kind = default if isinstance(default, type) else type(default[0] if several else default)
        value = None if kind is default else default
        limits = {"choices": (choices or {}).get(name), **several}
        parser.add_argument(flag, type=kind, default=value, help=f"default: {value}", **limits)
    return parser.parse_args(arguments)


def report(path: Path | None, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print tables by title; write all to a JSON file, if one is named.

    A row's keys are the columns. Fractions are printed with three significant digits.
    """
    machine = _machine()
    for title, rows in tables.items():
        table = Table(title=title)
        for name in rows[0] if rows else ():
            table.add_column(name.replace("_", "\n"), justify="right")
        for row in rows:
            table.add_row(*map(text_of, row.values()))
        Console(width=160).print(table)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if path:
        path.write_text(json.dumps({"machine": machine, "tables": tables}, indent=2) + "\n")


def markdown(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return tables by title as Markdown, as in `docs/benchmarks.md`."""
    parts = []
    for title, rows in tables.items():
        names = [name.replace("_", " ") for name in rows[0]]
        lines = [names, ["---"] * len(names), *(map(text_of, row.values()) for row in rows)]
        parts.append("\n".join([f"{title}:", "", *(f"| {' | '.join(line)} |" for line in lines)]))
    return "\n\n".join(parts)


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a file."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, marker, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (marker and ended):
        sys.exit(f"expected the lines {begin.strip()} and {end} in {path}, found neither or one")
    path.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def _machine() -> dict[str, Any]:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    load = round(psutil.getloadavg()[0], 1)
    return {"processor": (names or [platform.machine()])[0], "cores": os.cpu_count(), "load": load}


def machine_text(*, cores: int) -> str:
    """Describe the machine without its name or load."""
    return f"{_machine()['processor']}, cores used: {cores}, no GPU"


def text_of(value: object) -> str:
    if not isinstance(value, float) or not isfinite(value):
        return str(value)
    num_decimals = 2 - floor(log10(abs(value))) if value else 0
    return f"{value:,.{max(0, num_decimals)}f}"


def seconds_of(work: Callable[[], object], *, clock: Callable[[], float] = perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def take_turns(
    num_rounds: int, ways: Mapping[Way, Callable[[], Result]]
) -> dict[Way, list[Result]]:
    """Call each way once per round, so that other load on the machine affects all equally."""
    results: dict[Way, list[Result]] = {way: [] for way in ways}
    for _ in range(num_rounds):
        for way, work in ways.items():
            results[way].append(work())
    return results


def in_processes(
    work: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    environment: Mapping[str, str],
    *,
    num_processes: int | None = None,
) -> list[Result]:
    """Return the results of all calls of `work`, run in parallel, optionally a few at a time."""
    spawn, number = get_context("spawn"), num_processes or len(calls)
    with patch.dict(os.environ, environment), ProcessPoolExecutor(number, spawn) as pool:
        futures = [pool.submit(work, *call) for call in calls]
        return [future.result() for future in futures]


def peak_gb() -> float:
    """Return this process's peak memory.

    On Linux not by getrusage, which counts what its parent had when it started the process.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    (kib,) = (line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line)
    return int(kib) * 1024 / 1e9


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as options of `areal-flow`."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def environment(**added: str) -> dict[str, str]:
    """Return this process's environment, with this clone on the import path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **added}


def output_of(
    command: Sequence[str],
    *,
    cwd: Path = ROOT,
    stdin: str = "",
    added: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the output of a command with `added` in its environment; exit if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(**added), input=stdin, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def newest_step(cwd: Path, name: str) -> int:
    """Return the newest step of a run in a directory, or -1 if there is none yet."""
    from areal_flow.log.ledger import LedgerReader

    try:
        return LedgerReader(RunLayout(cwd / "runs" / name)).head
    except (ArealFlowError, OSError, ValueError):  # it has not begun
        return -1


def kill_driver(
    command: Sequence[str], cwd: Path, name: str, *, num_steps: int, limit_s: float
) -> int:
    """Kill a run's driver (`kill -9`) after so many steps or seconds; return the newest step.

    Its output goes to `DRIVER_LOG`. Exit if the driver ends by itself, or leaves processes behind.
    """
    log, until = cwd / DRIVER_LOG, monotonic() + limit_s
    with log.open("w") as file:
        driver = subprocess.Popen(
            command, cwd=cwd, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
        while newest_step(cwd, name) < num_steps and monotonic() < until:
            if driver.poll() is not None:
                sys.exit(f"{' '.join(command)} ended before step {num_steps}:\n{log.read_text()}")
            sleep(0.2)
        kill_with_workers(driver)
    return newest_step(cwd, name)


def kill_with_workers(driver: subprocess.Popen[bytes]) -> None:
    """Kill a driver by SIGKILL; exit if one of its processes outlives it by a minute."""
    workers = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    if alive:
        sys.exit(f"processes outlived their driver: {alive}")


def train(cwd: Path, name: str, settings: Mapping[str, object], recipe: str = RECIPE) -> Run:
    """Train a recipe with these settings in a directory, without evaluations and tracking unless
    they are set; return the run."""
    quiet = {"prompts.num-held-out": 0, "tracking.enabled": "false"}
    given = flags({"name": name, **quiet, **settings})
    output_of([*CLI, "train", recipe, *given], cwd=cwd)
    return areal_flow.open_run(cwd / "runs" / name)


def questions(run: Run, name: str) -> list[tuple[str, str]]:
    """Return a run's prompts (`train` or `held_out`) as it renders them, with their answers."""
    root = run.layout.root
    template = load_recipe(root / "config.toml").prompts.template
    rows = map(json.loads, (root / "prompts" / f"{name}.jsonl").read_text().splitlines())
    return [(template.replace("{question}", row["question"]), row["answer"]) for row in rows]


def steps_after(run: Run, num_skipped: int) -> list[dict[str, Any]]:
    """Return the ledger's rows without the first steps."""
    return [row for row in run.steps("arrow").to_pylist() if row["step"] > num_skipped]
