"""`areal-flow workers`, `plan` and `doctor`: processes of a job, planned ones, and this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from areal_flow.config.messages import OPTION
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import is_linux, system_name, usable_cores
from areal_flow.core.settings import nest
from areal_flow.rewards.code.sandbox.limits import SandboxError
from areal_flow.rewards.code.sandbox.self_test import LOST, choose_tier
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import AUTO, choose_engine
from areal_flow.rollout.engines.vllm.support import BUILDS, installed_vllm
from pipelines.cli.settings import Flag, Given, Overrides
from pipelines.console.tables import Report, Table

if TYPE_CHECKING:
    from areal_flow.cluster.control import WorkerStatus
    from areal_flow.cluster.placement import WorkerPlacement
    from areal_flow.config import Recipe

MIN_CORES = 2
MIN_FREE_GIB = 2
PACKAGES = ("torch", "transformers", "dask", "distributed", "pylance", "mlflow", "pandera")

Subject = tuple[str, str, bool | None, str]
"""What was looked at, what was found, whether it works (None: it is optional), what that means."""

group = App(name="workers", help="List, add and remove workers of a running job.")


@group.command(name="list")
def list_(run: str, /, *, folders: Given) -> Report:
    """List workers: role, process, work, heartbeat."""
    from areal_flow.cluster.control import list_workers
    from pipelines.cluster_address import scheduler_of

    statuses = asyncio.run(list_workers(*scheduler_of(folders.runs, run)))
    data = {"run": run, "workers": [asdict(status) for status in statuses]}
    return Report(data, [Table([_row(status) for status in statuses])])


@group.command
def add(
    run: str,
    /,
    *,
    role: Annotated[Literal["generator", "reward"], Parameter(help="What they do.")],
    count: Annotated[int, Parameter(help="How many.")] = 1,
    folders: Given,
) -> None:
    """Start more workers."""
    from areal_flow.cluster.control import add_workers
    from pipelines.cluster_address import scheduler_of

    scheduler, network = scheduler_of(folders.runs, run)
    names = asyncio.run(add_workers(scheduler, role, count, network))
    print(f"{', '.join(names)} joined {run}")


@group.command
def remove(run: str, worker: str, /, *, folders: Given) -> None:
    """Retire a worker by the name that `list` shows; its work is rescheduled."""
    from areal_flow.cluster.control import remove_worker
    from pipelines.cluster_address import scheduler_of

    scheduler, network = scheduler_of(folders.runs, run)
    asyncio.run(remove_worker(scheduler, worker, network))
    print(f"{worker} left {run}; what it was doing runs again elsewhere")


def _row(status: WorkerStatus) -> dict[str, Any]:
    """Return a worker as a row; nothing is known of one without a process but its deaths."""
    process: dict[str, Any] = {
        "pid": status.pid,
        "address": status.address,
        "slots": status.num_slots,
        "version": status.policy_version,
        "hash": status.served_hash[:12] or None,
        "transfer": _milliseconds(status.transfer_s),
        "stall": _milliseconds(status.stall_s),
        "running": status.num_running,
        "assigned": status.num_assigned,
        "silent": f"{status.silence_s:.0f} s",
    }
    return {
        "worker": status.name,
        "role": status.role,
        "state": status.state,
        **(process if status.address else dict.fromkeys(process)),
        "deaths": status.num_deaths,
    }


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.1f} ms"


def plan(
    recipe: Path | None = None,
    /,
    *,
    placement: Flag = False,
    memory: Flag = False,
    gpu: str = "H100-80GB",
    gpus: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    best_split: Flag = False,
    from_: Annotated[str | None, Parameter(name="--from", metavar="RUN")] = None,
    calibrate: Annotated[str | None, Parameter(metavar="RUN")] = None,
    price: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    settings: Overrides | None = None,
    folders: Given,
) -> Report:
    """Show which workers `train` would start, and estimate memory, time and cost.

    Args:
        recipe: A TOML recipe, or the name of a shipped one; `arithmetic` by default.
        placement: Workers, their hosts, and the command line or batch script of each kind.
        memory: Peak memory of each trainer rank for the longest rows, and whether it fits the GPU.
        gpu: GPU type.
        gpus: Simulate the run on this many GPUs: step time, staleness, cost, bottleneck.
        best_split: With --gpus: use the fastest split of GPUs instead of the recipe's.
        from_: With --gpus: take the lengths of prompts and completions from this run.
        calibrate: With --gpus: calibrate efficiency on this run, whose workers had one GPU each.
        price: With --gpus: price of a GPU hour in US dollars.
    """
    from pipelines.jobs.job import DEFAULT_RECIPE, chosen_recipe

    if placement + memory + (gpus is not None) != 1:
        raise ConfigError("expected what to plan: --placement, --memory or --gpus N")
    if gpus is None and (best_split or from_ or calibrate or price):
        raise ConfigError("--best-split, --from, --calibrate and --price go with --gpus N")
    chosen = chosen_recipe(recipe or DEFAULT_RECIPE, nest(settings or {}), spelling=OPTION)[1]
    if memory:
        from pipelines.cli.memory_report import report_memory

        return report_memory(str(recipe or DEFAULT_RECIPE), chosen, gpu=gpu)
    if gpus is not None:
        from pipelines.cli.plan_report import report_plan

        return report_plan(
            str(recipe or DEFAULT_RECIPE),
            chosen,
            gpus=gpus,
            gpu=gpu,
            lengths_of=folders.find(from_).run if from_ else None,
            calibrate_to=folders.find(calibrate).run if calibrate else None,
            best_split=best_split,
            price=price,
        )
    return _report_placement(chosen, logs=folders.runs.resolve() / "NAME" / "jobs")


def _report_placement(chosen: Recipe, *, logs: Path) -> Report:
    from areal_flow.cluster.launchers import make_launcher
    from areal_flow.cluster.placement import place_workers

    cluster = chosen.cluster
    launcher = make_launcher(f"tls://{cluster.network.host}:PORT", cluster, logs=logs)
    workers = place_workers(chosen)
    starts = {worker.name: launcher.preview(worker) for worker in workers}
    kinds = {start.replace(name, ""): name for name, start in reversed(starts.items())}
    shown = [f"\n{name}:\n{starts[name]}" for name in starts if name in kinds.values()]
    data = [asdict(worker) | {"start": starts[worker.name]} for worker in workers]
    return Report({"workers": data}, [Table([*map(_place, workers)]), *shown])


def _place(worker: WorkerPlacement) -> dict[str, Any]:
    return {
        "worker": worker.name,
        "host": worker.host or "this machine",
        "cores": worker.num_cores,
        "GPUs": ", ".join(worker.gpus) or worker.num_gpus,
        "slots": worker.num_slots,
    }


def doctor(*, folders: Given) -> Report:
    """Report what works on this machine."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    subjects = list(_subjects(folders.runs.resolve()))
    failed = [what for what, _, works, _ in subjects if works is False]
    rows = [
        {"": marks[works], "what": what, "found": value, "means": means}
        for what, value, works, means in subjects
    ]
    last = f"will not work until fixed: {', '.join(failed)}" if failed else "train will work here"
    names = ("what", "found", "works", "means")
    data = {"works": not failed, "machine": [dict(zip(names, f, strict=True)) for f in subjects]}
    return Report(data, [Table(rows, prose=("found", "means")), last], code=int(bool(failed)))


def _subjects(runs: Path) -> Iterator[Subject]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield "python", version, sys.version_info >= (3, 11), "3.11 or newer is needed"
    yield _system()
    enough = (cores := usable_cores()) >= MIN_CORES
    means = "generation and training overlap" if enough else "one core: they take turns, slowly"
    yield "cores", str(cores), True, means
    existing = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield "free disk", f"{free:.1f} GiB", free >= MIN_FREE_GIB, f"in {existing}"
    yield _loopback()
    installed = {version.name.lower(): version.version for version in distributions()}
    for name in PACKAGES:
        release = installed.get(name)
        advice = "installed" if release else "install the project with its constraints"
        yield name, release or "missing", bool(release), advice
    gpus = _gpus()
    yield gpus
    yield from _engines("cuda" if gpus[2] else "cpu")
    yield _sandbox()


def _system() -> Subject:
    if is_linux():
        return "system", system_name(), True, "all works on Linux"
    if os.name == "posix":
        means = (
            "only on Linux: sandboxes ('code', the tool 'python'), weights in shared memory, vLLM; "
            "not tested on this system"
        )
        return "system", system_name(), None, means
    return "system", system_name(), False, "Linux or macOS is needed: on Windows use WSL"


def _loopback() -> Subject:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return "loopback", str(error), False, "workers talk over 127.0.0.1"
    return "loopback", "127.0.0.1", True, "all that the local cluster listens on"


def _sandbox() -> Subject:
    try:
        tier = choose_tier()
    except SandboxError as error:
        return "sandbox", "none", None, f"only for the verifier 'code': {error}"
    return "sandbox", tier, True, LOST[tier] or "'code' runs programs in it; its self-test passes"


def _engines(device: str) -> Iterator[Subject]:
    builds = {
        build: version for device, build in BUILDS.items() if (version := installed_vllm(device))
    }
    means = "installed" if builds else "not needed: the torch engine needs nothing more"
    yield "vllm", ", ".join(map(" ".join, builds.items())) or "missing", None, means
    name, reason = choose_engine(GenerationSettings(engine=AUTO, device=device))
    yield "engine", name, None, f"what generation.engine = 'auto' uses: {reason}"


def _gpus() -> Subject:
    try:
        import torch
    except ImportError:
        return "gpu", "unknown", None, "torch is missing"
    if not torch.cuda.is_available():
        return "gpu", "none", None, "policies run on the CPU: trainer.device = 'cpu'"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "gpu", ", ".join(names), True, "trainer.device = 'cuda' uses the first"


COMMANDS = (group, plan, doctor)
