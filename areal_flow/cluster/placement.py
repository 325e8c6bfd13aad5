"""Places the worker processes of a recipe on machines and GPUs. It imports no Dask."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_flow.config import Recipe
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import VISIBLE_GPUS, installed_gpus, visible_gpus
from areal_flow.flow.flow_setup import groups_in_flight

WORKER_PROGRAM = ("-m", "areal_flow.cluster.worker")
"""Arguments of Python for a worker; its options and its parent's process number follow."""

CONTROL_THREADS = 4
"""Threads beyond a worker's slots, so that control tasks never queue behind rollouts."""

THIS_MACHINE = ""
NODES_OF_JOB = "SLURM_JOB_NODELIST"
GPUS_OF_NODE = "SLURM_GPUS_ON_NODE"
"""How many GPUs of the driver's node Slurm gave to the job; not set if it gave none."""
NUM_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Machines:
    """Hosts for workers, each with the same GPUs."""

    hosts: tuple[str, ...] = (THIS_MACHINE,)
    gpus: tuple[str, ...] = ()
    """What `CUDA_VISIBLE_DEVICES` calls each of them: an index or a UUID."""
    assign_gpus: bool = False
    """Whether a system chooses hosts and GPUs: then none are counted here."""


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """One worker process."""

    name: str
    role: str
    num_slots: int
    environment: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    host: str = THIS_MACHINE
    gpus: tuple[str, ...] = ()
    """Empty until it is placed, then `num_gpus` of its host."""
    num_sharing: int = 1
    """How many workers have these GPUs."""

    @property
    def resources(self) -> dict[str, int]:
        """Return its Dask resources: slots of its role and, of a trainer, its own rank."""
        rank = {self.name: 1} if self.role == "trainer" else {}
        return {self.role: self.num_slots, **rank}

    @property
    def num_threads(self) -> int:
        return self.num_slots + CONTROL_THREADS

    @property
    def num_cores(self) -> int:
        """Return how many threads of it compute."""
        return int(self.environment.get(NUM_THREADS, 1))

    @property
    def devices(self) -> dict[str, Any]:
        """Return what it has, by name and role: GPUs, or cores if it has none."""
        number = (self.num_gpus or self.num_cores) / self.num_sharing
        of = {"worker": self.name, "role": self.role}
        return {**of, "num_devices": number, "is_gpu": self.num_gpus > 0}


def place_workers(recipe: Recipe, machines: Machines | None = None) -> list[WorkerPlacement]:
    """Return the trainer ranks, generators and reward workers of a run, each on its machine."""
    machines = machines or machines_of(recipe.cluster)
    workers = _requested_workers(recipe)
    num_needed = sum(worker.num_gpus for worker in workers)
    num_available = len(machines.hosts) * len(machines.gpus)
    roles = [worker.role for worker in workers for _ in range(worker.num_gpus)]
    shares_gpu = recipe.cluster.num_gpus == num_available == 1 and sorted(roles) == [
        "generator",
        "trainer",
    ]
    if num_needed > num_available and not machines.assign_gpus and not shares_gpu:
        roles = [worker.role for worker in workers if worker.num_gpus]
        each = recipe.generation.vllm.tensor_parallel_size
        fewer = "start fewer workers"
        if recipe.cluster.launcher == "local":
            fewer += " or, on more machines, set cluster.launcher, such as 'srun'"
        raise ConfigError(
            f"expected a GPU for each of {roles.count('trainer')} trainer(s) and {each} for each "
            f"of {roles.count('generator')} generator(s) with device 'cuda' ({num_needed} in all), "
            f"found {num_available} GPU(s) on {len(machines.hosts)} machine(s); {fewer}, "
            "set a device to 'cpu', or set cluster.num_gpus (of each machine) if they "
            "were not found; at 1 a trainer and a generator share it"
        )
    placed: list[WorkerPlacement] = []
    if shares_gpu:
        workers = [replace(each, num_sharing=2 if each.num_gpus else 1) for each in workers]
    for worker in workers:
        placed.append(place_beside(worker, [] if shares_gpu else placed, machines))
    return placed


def place_beside(
    worker: WorkerPlacement, others: Sequence[WorkerPlacement], machines: Machines
) -> WorkerPlacement:
    """Return a worker with free GPUs, or, if it needs none, on the host with the fewest workers.

    GPU workers fill one host after the other, so that the ranks of a trainer are neighbours.
    """
    if not worker.num_gpus or machines.assign_gpus:
        hosts = [other.host for other in others]
        return replace(worker, host=min(machines.hosts, key=hosts.count))
    taken = {(other.host, gpu) for other in others for gpu in other.gpus}
    max_free = 0
    for host in machines.hosts:
        free = [gpu for gpu in machines.gpus if (host, gpu) not in taken]
        max_free = max(max_free, len(free))
        if len(free) >= worker.num_gpus:
            gpus = tuple(free[: worker.num_gpus])
            environment = worker.environment | {VISIBLE_GPUS: ",".join(gpus)}
            return replace(worker, host=host, gpus=gpus, environment=environment)
    raise ConfigError(
        f"expected {worker.num_gpus} free GPU(s) of one machine for {worker.name}, found "
        f"{max_free} of {len(machines.gpus)}; start fewer workers, or remove a GPU worker"
    )


def _requested_workers(recipe: Recipe) -> list[WorkerPlacement]:
    cluster = recipe.cluster
    generation = recipe.generation
    trainer_gpus = int(_is_gpu("trainer.device", recipe.trainer.device))
    on_gpu = _is_gpu("generation.device", generation.device)
    generator_gpus = generation.vllm.tensor_parallel_size if on_gpu else 0
    generator = worker_environment(1)
    trainer = worker_environment(cluster.num_trainer_threads)
    # A reward worker beside GPU workers must not take memory of a GPU.
    hidden = {VISIBLE_GPUS: ""} if generator_gpus or trainer_gpus else {}
    reward = worker_environment(1) | hidden
    kinds = (
        ("trainer", cluster.num_trainers, 1, trainer, trainer_gpus),
        ("generator", cluster.num_generators, groups_in_flight(recipe), generator, generator_gpus),
        ("reward", cluster.num_reward_workers, 1, reward, 0),
    )
    return [
        WorkerPlacement(f"{role}-{index}", role, num_slots, environment, num_gpus)
        for role, num_processes, num_slots, environment, num_gpus in kinds
        for index in range(num_processes)
    ]


def _is_gpu(setting: str, device: str) -> bool:
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"{setting} = {device!r}: expected 'cpu' or 'cuda'; each process sees only the GPUs "
            f"that it is given. To choose among them, start with {VISIBLE_GPUS} set"
        )
    return device == "cuda"


def machines_of(cluster: ClusterSettings) -> Machines:
    """Return the hosts and their GPUs; GPUs of other hosts must be stated in the settings.

    A launcher for other machines that is given no hosts has a system that chooses them.
    """
    if cluster.launcher == "local":
        return Machines(gpus=_gpus_here(cluster))
    if cluster.launcher == "srun":
        nodes = nodes_of_job()
        num_granted = os.environ.get(GPUS_OF_NODE, "")
        if num_granted.isdecimal() and (cluster.num_gpus or 0) > int(num_granted):
            raise ConfigError(
                f"cluster.num_gpus = {cluster.num_gpus}: it counts the GPUs of each node, and this "
                f"job has {num_granted} on its first ({GPUS_OF_NODE})"
            )
        return Machines(nodes, _gpus_here(cluster))
    if cluster.remote.hosts:
        return Machines(cluster.remote.hosts, visible_gpus({}, 0, stated=cluster.num_gpus))
    return Machines((cluster.launcher.capitalize(),), assign_gpus=True)


def _gpus_here(cluster: ClusterSettings) -> tuple[str, ...]:
    return visible_gpus(os.environ, len(installed_gpus()), stated=cluster.num_gpus)


def nodes_of_job() -> tuple[str, ...]:
    """Return the nodes of the Slurm job that this process runs in."""
    if not os.environ.get(NODES_OF_JOB):
        raise ConfigError(
            "cluster.launcher = 'srun' starts workers on the nodes of the driver's own Slurm job, "
            f"found none ({NODES_OF_JOB} is not set): start the driver by sbatch or in salloc, or "
            f"set {NODES_OF_JOB}, such as node[1-2], to see a plan. 'slurm' submits a job a worker"
        )
    command = ["scontrol", "show", "hostnames", os.environ[NODES_OF_JOB]]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the nodes of this job cannot be listed: {error}") from error
    if listed.returncode:
        raise ConfigError(
            f"the nodes of this job cannot be listed: {shlex.join(command)}: "
            f"{listed.stderr.strip() or f'exit status {listed.returncode}'}"
        )
    return tuple(listed.stdout.split())


def trainer_name(rank: int) -> str:
    """Return the name of a trainer rank's worker and of its own Dask resource."""
    return f"trainer-{rank}"


def worker_environment(num_threads: int) -> dict[str, str]:
    """Return variables that limit the threads of numeric libraries."""
    return {NUM_THREADS: str(num_threads), "MKL_NUM_THREADS": str(num_threads)}


PROCESS_ENVIRONMENT = {
    # glibc: keep freed tensors of up to 64 MiB instead of returning their pages at every step.
    # Larger ones would leave holes. One arena, or each thread that runs a step keeps its memory.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 26),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "OMP_WAIT_POLICY": "passive",
    # 0.6 MB for each size of matrix.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    "POLARS_MAX_THREADS": "1",
    "LANCE_CPU_THREADS": "1",
    "LANCE_IO_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DASK_LOGGING__DISTRIBUTED": "critical",
    "PYTHONUNBUFFERED": "1",  # its output is a pipe, and its end discards what is buffered
    "PYTHONHASHSEED": "0",
}
"""Of every worker process: glibc and loggers read these variables only at start."""
