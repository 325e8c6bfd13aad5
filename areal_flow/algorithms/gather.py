"""Rows that are taken more than once, with a gradient of the same bits each time.

PyTorch's own gradient of `rows[index]` adds up what comes back for a row in the order in which a
CPU's threads get there, and that of `index_select` in a GPU's. A replay must find the same bits.

Letters: T rows, R of them taken, O that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag


@dataclass(frozen=True, slots=True)
class GatherIndex:
    index_R: Tensor
    """The row of each that is taken."""
    owners_O: Tensor
    """Where among the taken each row is, for one row after the other."""
    first_T: Tensor
    """Of each row: where it begins among the owners."""

    @classmethod
    def of(cls, index_R: Tensor, num_rows: int) -> GatherIndex:
        """Return the index of `rows[index_R]`, of `num_rows` rows."""
        sorted_R, owners_R = index_R.sort(stable=True)
        every_T = torch.arange(num_rows, device=index_R.device)
        return cls(index_R, owners_R, torch.searchsorted(sorted_R, every_T))


def deterministic_gather(rows_T: Tensor, index: GatherIndex) -> Tensor:
    """Return `rows[index]`, `[R, ...]` of `[T, ...]`; gradients are added in the index's order."""
    rows_R: Tensor = _Gather.apply(rows_T, index)  # type: ignore[no-untyped-call]
    return rows_R


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_T: Tensor, index: GatherIndex) -> Tensor:
        ctx.index = index
        return rows_T.index_select(0, index.index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_R,) = gradients
        index = ctx.index
        flat_RD = gradient_R[:, None].flatten(1)
        added_TD = embedding_bag(index.owners_O, flat_RD, index.first_T, mode="sum")
        return added_TD.view(len(added_TD), *gradient_R.shape[1:]), None
