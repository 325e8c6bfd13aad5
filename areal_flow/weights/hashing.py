"""Weights that go nowhere: for a replay, which compares what would be served and must not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class HashingStage:
    """A `WeightsStage` that keeps the hash alone; there is nothing to publish or to load."""

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        from areal_flow.models.hashing import hash_tensors

        return hash_tensors(tensors)
