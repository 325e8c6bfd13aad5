"""What a trained token is, and how stale it is: the hard bound on staleness, token by token.

A token is trained if the policy chose it (`loss_mask`) and it is fresh enough.
`log/sql/tokens.sql` is the same rule in SQL. Versions are compared once per span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from areal_flow.core.types import VersionSpan


@dataclass(frozen=True, slots=True)
class StalenessCount:
    """Trained and too old tokens of some completions, and the trained ones' staleness."""

    num_masked: int = 0
    num_trained_by_staleness: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_trained(self) -> int:
        return sum(self.num_trained_by_staleness.values())

    @property
    def staleness_mean(self) -> float:
        total = sum(age * number for age, number in self.num_trained_by_staleness.items())
        return total / self.num_trained if self.num_trained else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self.num_trained_by_staleness, default=0)


def fresh_enough(version: int, *, policy_version: int, max_staleness: int) -> bool:
    return policy_version - version <= max_staleness


def trained_mask(
    spans: Sequence[VersionSpan],
    loss_mask: NDArray[np.bool_],
    *,
    policy_version: int,
    max_staleness: int,
) -> NDArray[np.bool_]:
    """Return one flag a token: True where it is trained."""
    bound = {"policy_version": policy_version, "max_staleness": max_staleness}
    fresh = np.array([fresh_enough(span.version, **bound) for span in spans], np.bool_)
    return loss_mask & fresh.repeat([span.length for span in spans])


def count_staleness(
    chosen: Iterable[Sequence[VersionSpan]], *, policy_version: int, max_staleness: int
) -> StalenessCount:
    """Count what a step would train and mask of the tokens that `loss_mask` keeps."""
    bound = {"policy_version": policy_version, "max_staleness": max_staleness}
    trained, masked = Counter[int](), 0
    for version, length in chain.from_iterable(chosen):
        if not fresh_enough(version, **bound):
            masked += length
        elif length:
            trained[policy_version - version] += length
    return StalenessCount(masked, trained)
