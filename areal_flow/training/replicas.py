"""The ranks of a trainer, which share a minibatch: one process for all of them, or one for each.

A minibatch is dealt to ranks as batches. One process computes every rank's batch (`ReplicaGroup`),
as a replay does, or processes compute one each (`ConnectedRanks`): torch's own process group,
gloo on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from areal_flow.core.errors import TrainerLost, TrainingError
from areal_flow.core.failures import first_line
from areal_flow.core.types import Rendezvous
from areal_flow.training.settings import TrainerSettings

CONNECTING_TIMEOUT_S, CONNECTING_S_PER_RANK = 300.0, 1.0


class ReplicaGroup:
    """The ranks, seen from one process, which here computes every rank's batch."""

    is_single_process = is_leader = True
    """Whether this process computes every rank's batch; stages weights, completes checkpoints."""
    name = "alone"
    """Of this group of processes, and no later one."""
    num_collectives = 0
    """That this process has begun: a process that is waited for has begun fewer."""
    is_within_step = False
    """Whether this process computes or waits for other ranks, and for nothing else."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.local_ranks: Sequence[int] = range(num_ranks)
        """The ranks whose batches this process computes."""

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        """Return every rank's tensor in the order of ranks; all have one shape and dtype.

        Args:
            tensors: those of `local_ranks`.

        Raises:
            TrainerLost: another rank left.
        """
        return [tensors[rank] for rank in self.local_ranks]

    def broadcast_flag(self, yes: bool) -> bool:
        return bool(self.gather({rank: torch.tensor(yes) for rank in self.local_ranks})[0])

    def broadcast_text(self, text: str) -> str:
        """Return the leader's text; those of all ranks have as many ASCII characters."""
        codes = torch.tensor([*text.encode()], dtype=torch.uint8)
        return bytes(self.gather(dict.fromkeys(self.local_ranks, codes))[0].tolist()).decode()

    def wait_for_all(self) -> None:
        self.broadcast_flag(True)

    @contextmanager
    def within_step(self) -> Iterator[None]:
        self.is_within_step = True
        try:
            yield
        finally:
            self.is_within_step = False

    def mesh(self, num_consecutive: int) -> Any:
        """Return a mesh of all ranks, with this many consecutive ones in its last dimension."""
        raise TrainingError("expected ranks that share a policy, found one process alone")

    def leave(self) -> None:
        """Leave the group: the other ranks' exchanges fail at once instead of waiting.

        Those of a mesh may wait until this process ends.
        """


class ConnectedRanks(ReplicaGroup):
    """One rank a process; a process is in one such group at a time."""

    is_single_process = False

    def __init__(
        self, rendezvous: Rendezvous, *, device_type: str, timeout: timedelta | None = None
    ) -> None:
        """Be a rank of this process's default group, which `connect_ranks` makes."""
        super().__init__(rendezvous.num_ranks)
        self.local_ranks = (rendezvous.rank,)
        self.is_leader = rendezvous.rank == 0
        self.name = rendezvous.name
        self._device_type = device_type
        self._timeout = timeout
        self._meshes: dict[int, Any] = {}
        self._left = False

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        (tensor,) = tensors.values()
        sent = tensor.detach().cpu().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.num_ranks)]
        if self._left:
            raise TrainerLost(f"rank {self.local_ranks[0]} left its replica group")
        with raise_trainer_lost():
            distributed.all_gather(received, sent)
        return [part.to(tensor.device) for part in received]

    def mesh(self, num_consecutive: int) -> Any:
        if num_consecutive not in self._meshes:
            sizes = (self.num_ranks // num_consecutive, num_consecutive)
            names = ("replicas", "shards")
            is_flat = sizes[0] == 1
            with raise_trainer_lost():
                mesh = init_device_mesh(
                    self._device_type, sizes[is_flat:], mesh_dim_names=names[is_flat:]
                )
            if self._timeout:  # made with torch's own
                for group in mesh.get_all_groups():
                    distributed.distributed_c10d._set_pg_timeout(self._timeout, group)
            self._meshes[num_consecutive] = mesh
        return self._meshes[num_consecutive]

    @property
    def num_collectives(self) -> int:  # type: ignore[override]
        meshes = [mesh.get_all_groups() for mesh in list(self._meshes.values())]
        groups = [*chain(*meshes), distributed.group.WORLD]
        return sum(group._get_sequence_number_for_group() for group in groups if group)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            leave_ranks()


def _listen_at(host: str) -> None:
    """Have gloo and NCCL listen at one address.

    By itself gloo takes that of the machine's name, and NCCL the first interface that it sees,
    unless the user's environment names one.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if host in {each.address for each in addresses}:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else it is a prefix


def connect_ranks(
    rendezvous: Rendezvous,
    point: Path,
    *,
    host: str,
    device_type: str = "cpu",
    timeout_s: float = 600.0,
) -> ConnectedRanks:
    """Connect by a file for this rendezvous alone, on a file system that all ranks see.

    All ranks must come within 300 s + 1 s a rank: each starts torch, and polls the one file.

    Args:
        host: this machine's address, at which the rank listens.
        timeout_s: how long an exchange waits for the other ranks.
    """
    timeout, rank, num_ranks = timedelta(seconds=timeout_s), rendezvous.rank, rendezvous.num_ranks
    leave_ranks()
    _listen_at(host)
    try:
        point.parent.mkdir(parents=True, exist_ok=True)
        store = distributed.FileStore(str(point), num_ranks)  # type: ignore[attr-defined]
        connecting_s = CONNECTING_TIMEOUT_S + CONNECTING_S_PER_RANK * num_ranks
        store.set_timeout(timedelta(seconds=connecting_s))
        if store.add(f"came-{rank}", 1) > 1:
            raise TrainerLost(f"rank {rank} was replaced while its replica group connected")
        store.wait([f"came-{other}" for other in range(num_ranks)])
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise TrainerLost(
            f"rank {rank} could not connect to the other ranks: {first_line(error)}"
        ) from error
    return ConnectedRanks(rendezvous, device_type=device_type, timeout=timeout)


def context_ranks(replicas: ReplicaGroup, settings: TrainerSettings) -> int:
    """Return how many processes share the tokens of their micro-batches."""
    return 1 if replicas.is_single_process else settings.parallel.context_ranks


@contextmanager
def raise_trainer_lost() -> Iterator[None]:
    """Raise `TrainerLost` where torch raises that another rank left."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise TrainerLost(f"another trainer rank left: {first_line(error)}") from error
        raise


def leave_ranks() -> None:
    """End this process's groups, if there are any.

    gloo closes its connections with the last reference to the group, which sharded policies hold:
    what other ranks wait for fails then, or when this process ends.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.distributed_c10d._abort_process_group()
