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

from pipelines.cli.tables import make_console, print_table

MIN_CORES = 2
MIN_FREE_GIB = 2
PACKAGES = ("torch", "transformers", "dask", "distributed", "pylance", "mlflow", "pandera")

_MARKS = {True: "ok", False: "FAIL", None: "-"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
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
    labels = ("", "what", "found", "means")
    rows = [(_MARKS[f.works], f.subject, f.found, f.meaning) for f in findings]
    print_table(make_console(), labels, rows, prose=labels[2:])
    failed = [finding.subject for finding in findings if finding.works is False]
    print(f"will not work until mended: {', '.join(failed)}" if failed else "train will work here")
    return 1 if failed else 0


def _python() -> Diagnosis:
    found = ".".join(map(str, sys.version_info[:3]))
    return Diagnosis("python", found, sys.version_info >= (3, 11), "3.11 or newer is needed")


def _cores() -> Diagnosis:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    enough = (cores or 1) >= MIN_CORES
    return Diagnosis(
        "cores",
        str(cores),
        True,
        "generation and training overlap" if enough else "one core: they take turns, slowly",
    )


def _disk(runs: Path) -> Diagnosis:
    existing = next(
        parent for parent in [runs.resolve(), *runs.resolve().parents] if parent.exists()
    )
    free = shutil.disk_usage(existing).free / 2**30
    return Diagnosis("free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}")


def _loopback() -> Diagnosis:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Diagnosis("loopback", str(error), False, "workers talk over 127.0.0.1")
    return Diagnosis("loopback", "127.0.0.1", True, "all that the local cluster listens on")


def _package(name: str) -> Diagnosis:
    try:
        return Diagnosis(name, version(name), True, "installed")
    except PackageNotFoundError:
        return Diagnosis(name, "missing", False, "install the project with its constraints")


def _gpus() -> Diagnosis:
    if importlib.util.find_spec("torch") is None:
        return Diagnosis("gpu", "unknown", None, "torch is missing")
    import torch

    if not torch.cuda.is_available():
        return Diagnosis("gpu", "none", None, "policies run on the CPU: trainer.device = 'cpu'")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Diagnosis("gpu", ", ".join(names), True, "trainer.device = 'cuda' uses the first")


def _vllm() -> Diagnosis:
    try:
        return Diagnosis(
            "vllm", version("vllm"), None, "installed; this version generates with torch"
        )
    except PackageNotFoundError:
        return Diagnosis("vllm", "missing", None, "not needed: generators use the torch engine")


def _isolation() -> Diagnosis:
    found = shutil.which("bwrap")
    return Diagnosis(
        "isolation",
        found or "none",
        None,
        "not needed: verifiers here compare answers, they run no model-written code",
    )
