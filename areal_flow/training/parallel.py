"""How several ranks share a model: rows of its tensors, and tokens of its micro-batches.

Sharding: torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) gathers a layer's weights for
its pass and adds up the ranks' gradients of it. All ranks make equally many passes, and read
weights tensor by tensor, together: no rank ever has a full copy.

Context parallelism: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). All layers work on a
rank's own tokens, and for attention the ranks exchange slices of all heads for full rows of some.
The results are exchanged, so that a loss sees whole sequences. A rank's gradients are of its own
tokens alone: added over ranks, they are the full gradient.

Letters: M trained tokens of a micro-batch, T tokens of its row (a multiple of P), P ranks, t tokens
of a rank's slice, H heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from areal_flow.core.errors import ConfigError
from areal_flow.policy.models.attention import AttentionRule, pass_dtype, to_device
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.policy.models.policy import DTYPES, layers_of
from areal_flow.training.sequences import MicroBatch
from areal_flow.training.settings import TrainerSettings


class ShardedModel(nn.Module):
    """Runs functions of a model whose weights are gathered for them."""

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
    """An exchange of ranks without copies; gloo's own take two to four times as long.

    Those receive into new memory, and then copy it to where it belongs.
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


def run_over_ranks(
    run: Callable[..., Any],
    group: Any,
    function: Callable[..., Any],
    micro: MicroBatch,
    **keywords: Any,
) -> Any:
    """Return `run(function, micro, **keywords)`, computed by all ranks of a group together.

    Gradients flow into this rank's own entries alone.
    """
    num_padding = -micro.input_ids_1T.shape[1] % group.size()
    tokens_1T = pad(micro.input_ids_1T, (0, num_padding))
    places = [*micro.layout.places]
    if num_padding:
        places.append(np.arange(micro.input_ids_1T.shape[1], tokens_1T.shape[1]))
    row = PackedLayout([len(each) for each in places], tokens_1T.device, places=places)
    layout = ContextLayout(row, group)
    inside_M = micro.predicting >= layout.slice.start
    inside_M &= micro.predicting < layout.slice.stop
    own_M = to_device(np.flatnonzero(inside_M), tokens_1T.device)
    own_micro = replace(
        micro,
        input_ids_1T=tokens_1T[:, layout.slice],
        layout=layout,
        predicting_M=micro.predicting_M[own_M] - layout.slice.start,
        predicting=micro.predicting[inside_M] - layout.slice.start,
        trained_M=micro.trained_M[own_M] - layout.slice.start,
        targets_M=micro.targets_M[own_M],
        top_Mk=None if micro.top_Mk is None else micro.top_Mk[own_M],
    )

    def all_entries(own: Tensor) -> Tensor:
        entries_M = own.new_zeros(len(inside_M), *own.shape[1:])
        entries_M.index_copy_(0, own_M, own.detach())
        distributed.all_reduce(entries_M, group=group)  # each entry is one rank's: exact
        return entries_M.index_copy(0, own_M, own) if own.requires_grad else entries_M

    return tree_map(all_entries, run(function, own_micro, **keywords))


class ContextLayout:
    """An `AttentionLayout` of one rank's slice of a packed row."""

    def __init__(self, row: PackedLayout, group: Any) -> None:
        self._row = row
        self.places = row.places
        self._group = group
        self.slice = own_slice(row.position_ids.shape[1], group)
        self.position_ids = row.position_ids[:, self.slice]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        num_ranks, dtype = self._group.size(), pass_dtype(value)
        # Rotary positions leave queries and keys in float32: twice what attention reads of them.
        query, key, value = (each.to(dtype) for each in (query, key, value))
        repeats = max(1, num_ranks // key.shape[1])
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        if rule.sinks is not None:
            own_heads = own_slice(query.shape[1], self._group)
            rule = replace(rule, sinks=rule.sinks[own_heads])
        query, key, value = (self._exchanged(each[0]) for each in (query, keys, values))
        return self._exchanged(self._row.attend(layer, query, key, value, rule)[0])

    def _exchanged(self, slice_XyD: Tensor) -> Tensor:
        """Return `[1, X / P, P y, D]`: all ranks' y of a rank's own part of X.

        From `[H, t, D]`, of all heads, are made some heads of all tokens; from `[T, H / P, D]`, of
        all tokens, a rank's own tokens of all heads.
        """
        length, width = slice_XyD.shape[1:]
        parts = slice_XyD.reshape(self._group.size(), -1, length, width)
        received = exchange(parts, self._group)
        return received.transpose(0, 1).reshape(1, parts.shape[1], -1, width)


def own_slice(total: int, group: Any) -> slice:
    length = total // group.size()
    return slice(group.rank() * length, (group.rank() + 1) * length)


def exchange(parts: Tensor, group: Any) -> Tensor:
    """Give part p of `[P, ...]` to rank p; return what the ranks have for this one."""
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Its gradient is the same exchange in reverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return exchange(gradient, ctx.group), None


def check_heads(policy: Any, num_ranks: int) -> None:
    config = policy.config.get_text_config()
    heads = config.num_attention_heads
    key_values = getattr(config, "num_key_value_heads", None) or heads
    if heads % num_ranks or (key_values % num_ranks and num_ranks % key_values):
        raise ConfigError(
            f"trainer.parallel.context_ranks ({num_ranks}): expected a divisor of the policy's "
            f"{heads} attention heads, and a divisor or a multiple of its {key_values} key-value "
            "heads; choose such a number"
        )
