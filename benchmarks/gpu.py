"""All tests and benchmarks for a GPU in under 25 minutes, as tables for the docs.

Each part is a command of its own, with a limit of time. One that fails becomes a line that says so,
and the exit code; the others run all the same. `--tiny` runs the same commands on a CPU, small: its
figures say nothing but that the commands work.

    python -m benchmarks.gpu [--parts step memory ...] [--docs docs/benchmarks.md] [--tiny]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import harness

MARKER = "gpu figures"


@dataclass(frozen=True)
class Part:
    command: str
    limit_s: int
    full: str = ""
    tiny: str = ""
    """Options of either form."""
    title: str = ""
    """Of what the last line says; empty: the command writes its tables to `--json`."""


TINY_STEP = "--device cpu --hidden 128 --layers 1 --vocabulary 512 --lengths 128 --steps 1"

MEMORY = "--device cuda --hidden 1536 --layers 28 --tokens 8192"
TINY_MEMORY = "--hidden 64 --layers 1 --tokens 128"

PARTS = {
    "step": Part(
        "benchmarks.gpu_step",
        120,
        full="--activations selective --lengths 16384",
        tiny=f"{TINY_STEP} --activations selective",
    ),
    "generation": Part(
        "benchmarks.gpu_generation",
        240,
        tiny="--engine torch --device cpu --dtype float32 --hidden 64 --layers 1 --vocabulary 512 "
        "--groups 2 --members 2 --tokens 8 --updates 1",
    ),
    "run": Part(
        "benchmarks.gpu_run", 400, tiny="--recipe gsm8k --device cpu --steps 4 --max-new-tokens 8"
    ),
    "long_step": Part(
        "benchmarks.gpu_step", 120, full="--activations recompute --lengths 32768", tiny=TINY_STEP
    ),
    "tests": Part("pytest tests/gpu -rs -p no:cacheprovider", 360, title="`tests/gpu`"),
    "memory": Part("benchmarks.memory", 200, full=MEMORY, tiny=TINY_MEMORY),
}
"""In this order: the first ten minutes show speed, new weights and a whole run. Under 25 minutes at
most, all together."""

Tables = Mapping[str, Sequence[Mapping[str, Any]]]


def run_part(name: str, *, tiny: bool, more: Sequence[str] = ()) -> tuple[Tables, bool]:
    """Run a part with extra options; return its tables, and whether it succeeded."""
    part = PARTS[name]
    options = [*(part.tiny if tiny else part.full).split(), *more]
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        written = [] if part.title else ["--json", str(report)]
        command = [sys.executable, "-m", *part.command.split(), *options, *written]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        try:
            done = subprocess.run(
                command, cwd=harness.ROOT, timeout=part.limit_s, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {name: [{"failed": f"not done after {part.limit_s} s"}]}, False
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        print(done.stdout, done.stderr, sep="", flush=True)
        if part.title:
            return {part.title: [{"result": lines[-1].strip("= ")}]}, done.returncode == 0
        if done.returncode:
            return {name: [{"failed": lines[-1]}]}, False
        return json.loads(report.read_text())["tables"], True


@contextmanager
def predicting(predictions: Sequence[str], chosen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Predict on idle CPU cores the memory that the part `memory` measures."""
    options = (TINY_MEMORY if chosen.tiny else MEMORY).split() if "memory" in chosen.parts else []
    command = [sys.executable, "-m", "benchmarks.memory", "--predict", *predictions, *options]
    process = subprocess.Popen(command if options else ["true"], cwd=harness.ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    docs = harness.ROOT / "docs" / "benchmarks.md"
    options = {"parts": list(PARTS), "docs": str(docs), "tiny": False}
    chosen = harness.parse_options(__doc__, choices={"parts": PARTS}, **options)
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or chosen.tiny):
        sys.exit("expected an NVIDIA GPU, found none; --tiny runs every part on a CPU")
    device = torch.cuda.get_device_name() if on_gpu and not chosen.tiny else "a CPU, `--tiny`"
    tables: dict[str, Any] = {}
    failed = []
    with TemporaryDirectory() as scratch:
        predictions = ("--predictions", str(Path(scratch) / "predictions.json"))
        with predicting(predictions, chosen) as predicted:
            for name in chosen.parts:
                if name == "memory":
                    predicted.wait()
                more = predictions if name == "memory" else ()
                added, worked = run_part(name, tiny=chosen.tiny, more=more)
                tables |= added
                failed += [] if worked else [name]
                # After each part: a machine that is taken away leaves what it has shown.
                text = f"Measured on {device}, torch {torch.__version__}.\n\n"
                harness.write_between(Path(chosen.docs), MARKER, text + harness.markdown(tables))
    harness.report(chosen.json, tables)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
