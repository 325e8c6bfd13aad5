"""Models of which each rank holds a part of each tensor: rows of weights, gradients and moments.

torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) gathers a layer's weights for its pass
and adds up the ranks' gradients of it. All ranks make equally many passes, and read weights tensor
by tensor, together: no rank ever has a whole copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from areal_flow.policy.models.policy import DTYPES, layers_of
from areal_flow.training.settings import TrainerSettings


class ShardedModel(nn.Module):
    """Runs functions of a model whose layers, and what is around them, are gathered for it."""

    def __init__(self, model: Any, mesh: DeviceMesh, settings: TrainerSettings) -> None:
        super().__init__()
        self.model = model
        layers = MixedPrecisionPolicy(
            param_dtype=None if settings.dtype == "float32" else DTYPES[settings.dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, mp_policy=layers)
        # Embedding, last norm and head stay gathered, in float32, until the backward pass is over:
        # chunks of the head are computed again in it. A reference has none.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        fully_shard(self, mesh=mesh, reshard_after_forward=not is_trained)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # A loss is divided by the size of its minibatch: ranks add up their gradients.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if mesh.device_type == "cpu":
                    gather, scatter = _GlooAllGather(), _GlooReduceScatter()
                    module.set_custom_all_gather(gather)  # type: ignore[arg-type]
                    module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]

    def forward(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(self.model, *arguments, **keywords)

    def reshard_all(self) -> None:
        """Free what is still gathered: the next pass gathers it again."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _GlooExchange:
    """An exchange of ranks that copies nothing: gloo's own take two to four times as long.

    They receive into new memory, and then copy it to where it belongs.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _GlooAllGather(_GlooExchange):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        parts = output_tensor.chunk(group.size())
        parts[group.rank()].copy_(input_tensor)
        for rank, part in enumerate(parts):
            distributed.broadcast(part, group_src=rank, group=group)


class _GlooReduceScatter(_GlooExchange):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        distributed.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def sharded_like(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return a tensor of which this rank has these rows, and which is split as a parameter is."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        rows.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
