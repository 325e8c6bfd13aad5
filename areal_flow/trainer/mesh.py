"""torch's own process group of the trainer's ranks, which what shards policies asks for.

A process has one at a time: ranks that form a new group leave the old one. Like every other group
it listens where the process is told to, which torch's gloo does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from areal_flow.errors import TrainerLost
from areal_flow.weights.gloo import connect_gloo, first_line

_BACKEND = "gloo_on_host"

_subgroups: list[Any] = []
"""This process's, beside the group of all ranks."""


def connect_ranks(
    store: Any, device_type: str, *, rank: int, num_ranks: int, host: str, timeout_s: float
) -> None:
    """Form the group, once all ranks are there."""
    from torch import distributed

    def connect(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> Any:
        seconds = timeout.total_seconds()
        return connect_gloo(store, rank=rank, num_ranks=num_ranks, host=host, timeout_s=seconds)

    leave_ranks()
    if _BACKEND.upper() not in dir(distributed.Backend):
        distributed.Backend.register_backend(_BACKEND, connect, devices=["cpu"])
    with raise_trainer_lost():
        distributed.init_process_group(
            f"cpu:{_BACKEND},cuda:nccl" if device_type == "cuda" else _BACKEND,
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )


def mesh_of_ranks(device_type: str, num_ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    with raise_trainer_lost():
        return init_device_mesh(device_type, (num_ranks,))


def consecutive_ranks(num_ranks: int) -> Any:
    """Return the group of so many consecutive ranks that this one is in; all ranks ask for one."""
    from torch import distributed

    with raise_trainer_lost():
        own, _ = distributed.new_subgroups(num_ranks)  # type: ignore[no-untyped-call]
    _subgroups.append(own)
    return own


@contextmanager
def raise_trainer_lost() -> Iterator[None]:
    """Raise `TrainerLost` where torch raises that another rank left."""
    from torch import distributed

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise TrainerLost(f"another trainer rank left: {first_line(error)}") from error
        raise


def leave_ranks() -> None:
    """End this process's group, if there is one.

    gloo closes its connections with the last reference to the group, which sharded policies hold:
    what other ranks wait for fails then, or when this process ends, or these are replaced.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for group in (*_subgroups, distributed.group.WORLD):
        group._get_backend(torch.device("cpu")).abort()
    _subgroups.clear()
    distributed.destroy_process_group()
