"""The backend whose ranks hold a part of each tensor: rows of weights, gradients and AdamW's state.

torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) gathers a layer's weights for its pass
and adds up the ranks' gradients of it. All ranks make equally many passes, and read weights tensor
by tensor, together: no rank ever has a whole copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from areal_flow.config import TrainerSettings
from areal_flow.errors import WeightsError
from areal_flow.models.hashing import TensorHash, hash_tensors
from areal_flow.models.policy import DTYPES, fill_buffers, layers_of, recompute_layers
from areal_flow.recovery.checkpoints import RNG_STATE
from areal_flow.trainer.backend import SavedRows
from areal_flow.trainer.context import over_ranks
from areal_flow.trainer.critic import PREFIX
from areal_flow.trainer.optimizers import forget_gradients, make_optimizer, update_if_finite
from areal_flow.trainer.passes import Passes
from areal_flow.trainer.replicas import ReplicaGroup, raise_trainer_lost
from areal_flow.trainer.tensor_rows import RowsFile, TensorRows
from areal_flow.trainer.updates import Minibatch, UpdateNumbers
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import StreamedTensors, WeightsWriter


class ShardedBackend:
    """A `TrainerBackend`: this rank's rows of the master policy and of its optimizer."""

    is_sharded = True
    critic = None

    def __init__(self, policy: Any, settings: TrainerSettings, replicas: ReplicaGroup) -> None:
        """Take a policy whose parameters may be on the meta device: weights are loaded later."""
        self.policy = policy
        self.settings = settings
        self._mesh = replicas.mesh(torch.device(settings.device).type)
        if settings.activations == "recompute":
            recompute_layers(policy)
        self._run = _Sharded(policy, self._mesh, settings)
        self.optimizer = make_optimizer(policy.named_parameters(), settings)
        self._over_ranks = partial(over_ranks, settings=settings, replicas=replicas)
        run = self._over_ranks(self._run)
        self.passes = Passes(run, settings, replicas, reference=run)
        self.has_reference = False

    def hold_reference(self, policy: Any) -> None:
        self.has_reference = True
        frozen = policy.requires_grad_(False)
        self.passes.reference = self._over_ranks(_Sharded(frozen, self._mesh, self.settings))

    def update(self, minibatch: Minibatch) -> UpdateNumbers:
        (rank,) = minibatch.micro_batches
        forget_gradients(self.optimizer)
        with raise_trainer_lost():
            bound = self.passes.minibatch_bound(minibatch)
            found = self.passes.backward(minibatch, rank, bound)
            trainable, max_norm = self.optimizer.trainable, self.settings.max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(trainable, max_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            numbers = self.passes.read({rank: found}, norm)
        self._run.reshard_all()  # what passes without gradients gathered is old after the update
        rate = minibatch.learning_rate
        return update_if_finite(self.optimizer, numbers, learning_rate=rate, name="update")

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the weights, each gathered when it is read: all ranks read, in the same order."""
        tensors = self._tensors()
        return StreamedTensors(_like(tensors), read=lambda name: _whole(tensors[name]))

    def stage(self, version: int, channel: WeightsWriter, *, dtype: torch.dtype) -> PolicyHashes:
        tensors, master = self._tensors(), TensorHash()

        def read(name: str) -> Tensor:
            whole = _whole(tensors[name])
            master.add(name, whole.cpu().contiguous())
            return whole.to(dtype)

        served_hash = channel.stage(version, StreamedTensors(_like(tensors, dtype), read=read))
        return PolicyHashes(master.hexdigest(), served_hash)

    def fingerprint(self) -> str:
        return hash_tensors(self.export_weights())

    def save(self) -> SavedRows:
        return SavedRows(_own_rows(self._tensors()), _own_rows(self.optimizer.named_state()))

    def load_rows(self, weights: RowsFile, optimizer: RowsFile) -> None:
        tensors = self._tensors()
        if weights.names != tensors.keys():
            odd = sorted(weights.names ^ tensors.keys())
            raise WeightsError(
                f"expected the policy's {len(tensors)} tensors, found {len(weights.names)}; "
                f"not in both: {', '.join(odd[:4])}"
            )
        for name, tensor in tensors.items():
            local, first_row = _local(tensor)
            rows = weights.rows(name, first_row, len(local) if local.ndim else 1)
            if rows.shape != local.shape:
                raise WeightsError(
                    f"{name}: expected rows of shape {tuple(local.shape)}, "
                    f"found {tuple(rows.shape)}"
                )
            local.copy_(rows)
        self._run.reshard_all()
        # A fork from a run with a critic leaves it behind.
        names = [n for n in sorted(optimizer.names) if n != RNG_STATE and not n.startswith(PREFIX)]
        self.optimizer.load_named_state({name: self._state(name, optimizer) for name in names})

    def _state(self, name: str, optimizer: RowsFile) -> Tensor:
        parameter = self.policy.get_parameter(name.rpartition(".")[0]).detach()
        local, first_row = _local(parameter)
        rows = optimizer.rows(name, first_row, len(local))
        if not rows.ndim or not isinstance(parameter, DTensor):
            return rows
        return DTensor.from_local(
            rows.to(local.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Return the policy's tensors by name, a tied one once; those with parts are DTensors."""
        parameters = dict(self.policy.named_parameters())
        return {
            name: tensor.detach()
            for name, tensor in self.policy.state_dict().items()
            if name in parameters or not isinstance(tensor, DTensor)
        }


class _Sharded(nn.Module):
    """Runs functions of a policy whose layers, and what is around them, are gathered for it."""

    def __init__(self, policy: Any, mesh: DeviceMesh, settings: TrainerSettings) -> None:
        super().__init__()
        self.policy = policy
        layers = MixedPrecisionPolicy(
            param_dtype=None if settings.dtype == "float32" else DTYPES[settings.dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for layer in layers_of(policy):
            fully_shard(layer, mesh=mesh, mp_policy=layers)
        # Embedding, last norm and head stay gathered, in float32, until the backward pass is over:
        # chunks of the head are computed again in it.
        fully_shard(self, mesh=mesh, reshard_after_forward=False)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # A loss is divided by the size of its minibatch: ranks add up their gradients.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device=settings.device)
            policy.tie_weights()
            fill_buffers(policy)

    def forward(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(self.policy, *arguments, **keywords)

    def reshard_all(self) -> None:
        """Free what is still gathered: the next pass gathers it again."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with raise_trainer_lost():
        return tensor.full_tensor()


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor, and the number of the first one."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    rows_each = -(-num_rows // mesh.size())  # as torch splits them: the last ranks may have fewer
    return tensor.to_local(), min(mesh.get_local_rank() * rows_each, num_rows)


def _own_rows(tensors: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    found = {}
    for name, tensor in tensors.items():
        local, first_row = _local(tensor)
        copy = local.detach().to("cpu", copy=True).contiguous()
        found[name] = TensorRows(copy, tuple(tensor.shape), first_row)
    return found


def _like(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
