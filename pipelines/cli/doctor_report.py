"""What this machine has, and what of this project will work on it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

MIN_CORES = 2
MIN_FREE_GIB = 2
PACKAGES = ("torch", "transformers", "dask", "distributed", "pylance", "mlflow", "pandera")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `works` is None for what is optional and absent."""

    subject: str
    found: str
    works: bool | None
    meaning: str


def doctor(runs: Path) -> int:
    """Print what was found; return 0 if `areal-flow train` will work here, else 1."""
    findings = [
        _python(),
        _cores(),
        _disk(runs),
        _loopback(),
        *(_package(name) for name in PACKAGES),
        _gpus(),
        _vllm(),
        _isolation(),
    ]
    table = Table(box=None)
    for label in ("", "what", "found", "means"):
        table.add_column(label, overflow="fold")
    marks = {True: "ok", False: "FAIL", None: "-"}
    for finding in findings:
        table.add_row(marks[finding.works], finding.subject, finding.found, finding.meaning)
    Console().print(table, markup=False, highlight=False)
    failed = [finding.subject for finding in findings if finding.works is False]
    print(f"will not work until mended: {', '.join(failed)}" if failed else "train will work here")
    return 1 if failed else 0


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", found, sys.version_info >= (3, 11), "3.11 or newer is needed")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    enough = (cores or 1) >= MIN_CORES
    return Finding(
        "cores",
        str(cores),
        True,
        "generation and training overlap" if enough else "one core: they take turns, slowly",
    )


def _disk(runs: Path) -> Finding:
    existing = next(
        parent for parent in [runs.resolve(), *runs.resolve().parents] if parent.exists()
    )
    free = shutil.disk_usage(existing).free / 2**30
    return Finding("free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}")


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("loopback", str(error), False, "workers talk over 127.0.0.1")
    return Finding("loopback", "127.0.0.1", True, "all that the local cluster listens on")


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name), True, "installed")
    except PackageNotFoundError:
        return Finding(name, "missing", False, "install the project with its constraints")


def _gpus() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "unknown", None, "torch is missing")
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "none", None, "policies run on the CPU: trainer.device = 'cpu'")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("gpu", ", ".join(names), True, "trainer.device = 'cuda' uses the first")


def _vllm() -> Finding:
    try:
        return Finding(
            "vllm", version("vllm"), None, "installed; this version generates with torch"
        )
    except PackageNotFoundError:
        return Finding("vllm", "missing", None, "not needed: generators use the torch engine")


def _isolation() -> Finding:
    found = shutil.which("bwrap")
    return Finding(
        "isolation",
        found or "none",
        None,
        "not needed: verifiers here compare answers, they run no model-written code",
    )
