"""What this machine has, and what of this project will work on it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipelines.cli.tables import Columns, Report, Table

MIN_CORES = 2
MIN_FREE_GIB = 2
PACKAGES = ("torch", "transformers", "dask", "distributed", "pylance", "mlflow", "pandera")

Subject = tuple[str, str, bool | None, str]
"""What was looked at, what was found, whether it works (None: it is optional), what that means."""


def report_machine(runs: Path) -> Report:
    """Report what this machine has; the exit code is 1 if `areal-flow train` will not work here."""
    names, marks = ("what", "found", "works", "means"), {True: "ok", False: "FAIL", None: "-"}
    found = [dict(zip(names, subject, strict=True)) for subject in _subjects(runs)]
    failed = [str(subject["what"]) for subject in found if subject["works"] is False]
    last = f"will not work until mended: {', '.join(failed)}" if failed else "train will work here"
    columns: Columns = {
        "": lambda row: marks[row["works"]],
        **{name: f"{{{name}}}" for name in names if name != "works"},
    }
    table = Table(columns, found, prose=("found", "means"))
    return Report({"works": not failed, "machine": found}, [table, last], code=int(bool(failed)))


def _subjects(runs: Path) -> Iterator[Subject]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield "python", found, sys.version_info >= (3, 11), "3.11 or newer is needed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    enough = (cores or 1) >= MIN_CORES
    means = "generation and training overlap" if enough else "one core: they take turns, slowly"
    yield "cores", str(cores), True, means
    folders = [runs.resolve(), *runs.resolve().parents]
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield "free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield "loopback", str(error), False, "workers talk over 127.0.0.1"
    else:
        yield "loopback", "127.0.0.1", True, "all that the local cluster listens on"
    for name in PACKAGES:
        release = _version(name)
        advice = "installed" if release else "install the project with its constraints"
        yield name, release or "missing", bool(release), advice
    yield _gpus()
    vllm = _version("vllm")
    means = "installed; this version generates with torch"
    means = means if vllm else "not needed: generators use the torch engine"
    yield "vllm", vllm or "missing", None, means
    means = "not needed: verifiers here compare answers, they run no model-written code"
    yield "isolation", shutil.which("bwrap") or "none", None, means


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> Subject:
    try:
        import torch
    except ImportError:
        return "gpu", "unknown", None, "torch is missing"
    if not torch.cuda.is_available():
        return "gpu", "none", None, "policies run on the CPU: trainer.device = 'cpu'"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "gpu", ", ".join(names), True, "trainer.device = 'cuda' uses the first"
