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
class Taken:
    """Which rows are taken, and for each row where its gradients come from."""

    index_R: Tensor
    """The row of each that is taken."""
    owners_O: Tensor
    """Where among the taken each row is, for one row after the other."""
    first_T: Tensor
    """Of each row: where it begins among the owners."""

    @classmethod
    def of(cls, index_R: Tensor, num_rows: int) -> Taken:
        """Return it for the rows of an index, of so many rows."""
        sorted_R, owners_R = index_R.sort(stable=True)
        every_T = torch.arange(num_rows, device=index_R.device)
        return cls(index_R, owners_R, torch.searchsorted(sorted_R, every_T))


def take_rows(rows_T: Tensor, taken: Taken) -> Tensor:
    """Return `rows[index]`, `[R, ...]` of `[T, ...]`; gradients are added in the index's order."""
    found_R: Tensor = _TakeRows.apply(rows_T, taken)  # type: ignore[no-untyped-call]
    return found_R


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_T: Tensor, taken: Taken) -> Tensor:
        ctx.taken = taken
        return rows_T.index_select(0, taken.index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_R,) = gradients
        taken = ctx.taken
        flat_RD = gradient_R[:, None].flatten(1)
        added_TD = embedding_bag(taken.owners_O, flat_RD, taken.first_T, mode="sum")
        return added_TD.view(len(added_TD), *gradient_R.shape[1:]), None
