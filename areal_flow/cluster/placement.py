"""A recipe in, the worker processes of one machine out. Pure: no Dask here."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_flow.config import Recipe

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
    def num_threads(self) -> int:
        return self.num_slots + CONTROL_THREADS


def place_workers(recipe: Recipe) -> list[WorkerPlacement]:
    """Return generators, the trainer and the reward workers of a local cluster."""
    cluster = recipe.cluster
    generators = [
        WorkerPlacement(
            name=f"generator-{index}",
            role="generator",
            num_slots=groups_in_flight(recipe),
            environment=thread_environment(cluster.threads_per_worker),
        )
        for index in range(cluster.num_generators)
    ]
    trainer = WorkerPlacement(
        "trainer-0", "trainer", 1, thread_environment(cluster.num_trainer_threads)
    )
    rewards = [
        WorkerPlacement(f"reward-{index}", "reward", 1, thread_environment(1))
        for index in range(recipe.rewards.num_workers)
    ]
    return [*generators, trainer, *rewards]


def groups_in_flight(recipe: Recipe) -> int:
    """Return how many groups one generator holds: enough to fill its slots, and two in waiting."""
    return -(-recipe.generation.num_slots // recipe.controller.group_size) + 2


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return variables that keep numeric libraries from spinning on each other's cores."""
    count = str(num_threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "passive",
        "LANCE_CPU_THREADS": "1",
        "LANCE_IO_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
