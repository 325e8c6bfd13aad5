"""A recipe in, the worker processes of one machine out. Pure: no Dask here."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_flow.config import Recipe

ROLES = ("generator", "reward", "trainer")

CONTROL_THREADS = 4
"""Threads beyond a worker's slots, so that control tasks never queue behind rollouts."""


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """One worker process: its name, role, slots and environment."""

    name: str
    role: str
    num_slots: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, int]:
        """Return what its tasks ask for: slots of its role and, of a trainer, that very rank."""
        rank = {self.name: 1} if self.role == "trainer" else {}
        return {self.role: self.num_slots, **rank}

    @property
    def num_threads(self) -> int:
        return self.num_slots + CONTROL_THREADS


def place_workers(recipe: Recipe) -> list[WorkerPlacement]:
    """Return generators, trainer ranks and reward workers of a local cluster."""
    cluster = recipe.cluster
    generators = [
        WorkerPlacement(
            name=f"generator-{index}",
            role="generator",
            num_slots=groups_in_flight(recipe),
            environment=worker_environment(cluster.threads_per_worker),
        )
        for index in range(cluster.num_generators)
    ]
    trainers = [
        WorkerPlacement(
            trainer_name(rank), "trainer", 1, worker_environment(cluster.num_trainer_threads)
        )
        for rank in range(cluster.num_trainers)
    ]
    rewards = [
        WorkerPlacement(f"reward-{index}", "reward", 1, worker_environment(1))
        for index in range(cluster.num_reward_workers)
    ]
    return [*generators, *trainers, *rewards]


def trainer_name(rank: int) -> str:
    """Return the name of a trainer rank's worker, which is also a resource that it alone has."""
    return f"trainer-{rank}"


def groups_in_flight(recipe: Recipe) -> int:
    """Return how many groups one generator holds: enough to fill its slots, and two in waiting."""
    return -(-recipe.generation.max_num_seqs // recipe.controller.group_size) + 2


def max_running_trajectories(recipe: Recipe, *, num_generators: int) -> int:
    """Return how many trajectories may be on the cluster: what runs, and as much queued behind it.

    A queued group ages no tokens, and its generator starts it without asking the scheduler.
    """
    groups = 2 * groups_in_flight(recipe) * max(1, num_generators)
    return groups * recipe.controller.group_size


def worker_environment(num_threads: int) -> dict[str, str]:
    """Return a worker's own variables: numeric libraries must keep off each other's cores."""
    return {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}


PROCESS_ENVIRONMENT = {
    # glibc: keep freed tensors instead of giving their pages back at every step.
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "OMP_WAIT_POLICY": "passive",
    "POLARS_MAX_THREADS": "1",
    "LANCE_CPU_THREADS": "1",
    "LANCE_IO_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DASK_LOGGING__DISTRIBUTED": "critical",
}
"""What every worker process must find at its start: glibc and loggers look only then."""
