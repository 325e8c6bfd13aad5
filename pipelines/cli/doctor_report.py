"""What this machine has, and what of this project will work on it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
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
    findings = list(_diagnoses(runs))
    labels = ("", "what", "found", "means")
    rows = [(_MARKS[f.works], f.subject, f.found, f.meaning) for f in findings]
    print_table(make_console(), labels, rows, prose=labels[2:])
    failed = [finding.subject for finding in findings if finding.works is False]
    print(f"will not work until mended: {', '.join(failed)}" if failed else "train will work here")
    return 1 if failed else 0


def _diagnoses(runs: Path) -> Iterator[Diagnosis]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield Diagnosis("python", found, sys.version_info >= (3, 11), "3.11 or newer is needed")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    enough = (cores or 1) >= MIN_CORES
    means = "generation and training overlap" if enough else "one core: they take turns, slowly"
    yield Diagnosis("cores", str(cores), True, means)
    folders = [runs.resolve(), *runs.resolve().parents]
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield Diagnosis("free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}")
    yield _loopback()
    for name in PACKAGES:
        release = _version(name)
        advice = "installed" if release else "install the project with its constraints"
        yield Diagnosis(name, release or "missing", bool(release), advice)
    yield _gpus()
    vllm = _version("vllm")
    means = "installed; this version generates with torch"
    means = means if vllm else "not needed: generators use the torch engine"
    yield Diagnosis("vllm", vllm or "missing", None, means)
    means = "not needed: verifiers here compare answers, they run no model-written code"
    yield Diagnosis("isolation", shutil.which("bwrap") or "none", None, means)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _loopback() -> Diagnosis:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Diagnosis("loopback", str(error), False, "workers talk over 127.0.0.1")
    return Diagnosis("loopback", "127.0.0.1", True, "all that the local cluster listens on")


def _gpus() -> Diagnosis:
    if importlib.util.find_spec("torch") is None:
        return Diagnosis("gpu", "unknown", None, "torch is missing")
    import torch

    if not torch.cuda.is_available():
        return Diagnosis("gpu", "none", None, "policies run on the CPU: trainer.device = 'cpu'")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Diagnosis("gpu", ", ".join(names), True, "trainer.device = 'cuda' uses the first")
