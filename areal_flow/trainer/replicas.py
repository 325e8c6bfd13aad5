"""How the ranks of a trainer add up their gradients: in the order of ranks.

A minibatch is dealt to ranks as batches. The gradient of each rank's batch is computed by itself,
and the gradients are then added in order. So one process that computes every rank's batch
(`SingleProcess`) makes, bit for bit, what the processes of a replica group make together
(`GlooGroup`): a replay needs no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from areal_flow.config import TrainerSettings
from areal_flow.errors import TrainerLost, TrainingError
from areal_flow.types import Rendezvous
from areal_flow.weights.gloo import connect_gloo, first_line, reach_store, serve_store

MEETING_TIMEOUT_S = 300.0
EXCHANGE_TIMEOUT_S = 3600.0
"""A rank that dies closes its connections, and one that hangs is killed: this is for neither."""

_BACKEND = "gloo_on_host"

_subgroups: list[Any] = []
"""This process's, beside torch's own group of all ranks: a process has one such group at a time."""


class ReplicaGroup(Protocol):
    """The ranks, seen from one process."""

    num_ranks: int
    mine: Sequence[int]
    """The ranks whose batches this process computes."""
    leads: bool
    """Whether this process stages weights and completes checkpoints."""
    name: str
    """Of this group of processes, and no later one."""

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        """Return every rank's tensor in the order of ranks; all have one shape and dtype.

        Args:
        tensors: those of `mine`.

        Raises:
        TrainerLost: another rank left.
        """

    @property
    def is_alone(self) -> bool:
        """Whether this process computes every rank's batch."""

    def mesh(self, device_type: str) -> Any:
        """Return torch's mesh of the ranks, for policies of which each rank has a part.

        Raises:
            TrainerLost: another rank left.
        """

    def subgroup(self, num_ranks: int, device_type: str) -> Any:
        """Return torch's group of so many consecutive ranks, of which this is one.

        Raises:
            TrainerLost: another rank left.
        """

    def leave(self) -> None:
        """Leave the group: the other ranks' exchanges fail at once instead of waiting.

        Those of a mesh or a subgroup may wait until this process ends.
        """


class SingleProcess:
    """One process that computes every rank's batch: the only rank, or a replay of many."""

    leads = is_alone = True

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.mine: Sequence[int] = range(num_ranks)
        self.name = "alone"

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        return [tensors[rank] for rank in self.mine]

    def mesh(self, device_type: str) -> Any:
        raise TrainingError("expected ranks that share a policy, found one process alone")

    def subgroup(self, num_ranks: int, device_type: str) -> Any:
        raise TrainingError("expected ranks that share sequences, found one process alone")

    def leave(self) -> None: ...


class GlooGroup:
    """One rank a process, connected by gloo; a mesh of ranks with GPUs uses NCCL."""

    is_alone = False

    def __init__(self, rendezvous: Rendezvous, point: Path, *, host: str) -> None:
        """Connect by a file for this rendezvous alone, on a file system that all ranks see."""
        self.mine: Sequence[int] = (rendezvous.rank,)
        self.leads = rendezvous.rank == 0
        self.name = rendezvous.name
        self.num_ranks = rendezvous.num_ranks
        self._host = host
        self._is_torchs_group = False
        self._group: Any = None
        try:
            self._group = _connect(rendezvous, point, host)
        except RuntimeError as error:
            raise TrainerLost(
                f"rank {rendezvous.rank} could not connect to the other ranks: {first_line(error)}"
            ) from error
        finally:
            if self.leads:
                point.unlink(missing_ok=True)

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        (tensor,) = tensors.values()
        sent = tensor.detach().cpu().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.num_ranks)]
        if self._group is None:
            raise TrainerLost(f"rank {self.mine[0]} left its replica group")
        try:
            self._group.allgather([received], [sent]).wait()
        except RuntimeError as error:
            self.leave()
            raise TrainerLost(f"another trainer rank left: {first_line(error)}") from error
        return [part.to(tensor.device) for part in received]

    def mesh(self, device_type: str) -> Any:
        self._connect_torch(device_type)
        from torch.distributed.device_mesh import init_device_mesh

        with raise_trainer_lost():
            return init_device_mesh(device_type, (self.num_ranks,))

    def subgroup(self, num_ranks: int, device_type: str) -> Any:
        self._connect_torch(device_type)
        from torch import distributed

        with raise_trainer_lost():
            own, _ = distributed.new_subgroups(num_ranks)  # type: ignore[no-untyped-call]
        _subgroups.append(own)
        return own

    def _connect_torch(self, device_type: str) -> None:
        if self._is_torchs_group:
            return
        with raise_trainer_lost():
            _connect_torch(
                self._store(), device_type, self.mine[0], self.num_ranks, host=self._host
            )
        self._is_torchs_group = True

    def _store(self) -> Any:
        """Return a store that the leader keeps, and whose address it tells the others."""
        if self.leads:
            store, port = serve_store(self._host)
        sent = torch.zeros(256, dtype=torch.uint8)
        if self.leads:
            address = f"{self._host} {port}".encode()
            sent[: len(address)] = torch.tensor([*address], dtype=torch.uint8)
        host, port_text = bytes(self.gather({self.mine[0]: sent})[0]).rstrip(b"\0").decode().split()
        return store if self.leads else reach_store(host, int(port_text))

    def leave(self) -> None:
        if self._is_torchs_group:
            leave_ranks()
        self._group = None  # its end closes the connections


def _connect(rendezvous: Rendezvous, point: Path, host: str) -> Any:
    # Here, since not every build of torch has it.
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    point.parent.mkdir(parents=True, exist_ok=True)
    store = FileStore(str(point), rendezvous.num_ranks)
    store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
    if store.add(f"came-{rendezvous.rank}", 1) > 1:
        raise TrainerLost(f"rank {rendezvous.rank} was replaced while its replica group connected")
    store.wait([f"came-{rank}" for rank in range(rendezvous.num_ranks)])
    group = connect_gloo(
        store,
        rank=rendezvous.rank,
        num_ranks=rendezvous.num_ranks,
        host=host,
        timeout_s=EXCHANGE_TIMEOUT_S,
    )
    group.barrier().wait()  # the others may still be reading where to connect
    return group


def context_ranks(replicas: ReplicaGroup, settings: TrainerSettings) -> int:
    """Return how many processes share the tokens of their micro-batches, as one rank together."""
    return 1 if replicas.is_alone else settings.parallel.context_ranks


def _connect_torch(store: Any, device_type: str, rank: int, num_ranks: int, *, host: str) -> None:
    """Form torch's own group; unlike torch's gloo it listens at `host`."""
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
            timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
        )


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
    what other ranks wait for fails then, or when this process ends.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for group in (*_subgroups, distributed.group.WORLD):
        group._get_backend(torch.device("cpu")).abort()
    _subgroups.clear()
    distributed.destroy_process_group()
