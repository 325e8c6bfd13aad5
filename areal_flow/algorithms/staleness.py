"""Which tokens may carry gradient: the hard bound, on tokens. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areal_flow.types import VersionSpan


@dataclass(frozen=True, slots=True)
class StalenessCount:
    """Trained and masked tokens of one or more completions, and the trained ones' staleness."""

    num_trained: int = 0
    num_masked: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.num_trained if self.num_trained else 0.0


def fresh_enough(version: int, *, policy_version: int, max_staleness: int) -> bool:
    """Return whether a token sampled by `version` may train `policy_version`."""
    return policy_version - version <= max_staleness


def trainable_mask(
    spans: Iterable[VersionSpan], *, policy_version: int, max_staleness: int
) -> list[bool]:
    """Return one flag a token: True where its staleness is at most `max_staleness`."""
    mask: list[bool] = []
    for version, length in spans:
        fresh = fresh_enough(version, policy_version=policy_version, max_staleness=max_staleness)
        mask.extend([fresh] * length)
    return mask


def count_staleness(
    completions: Iterable[Sequence[VersionSpan]], *, policy_version: int, max_staleness: int
) -> StalenessCount:
    """Count what a step at `policy_version` would train and mask."""
    trained = masked = staleness_sum = staleness_max = 0
    for spans in completions:
        for version, length in spans:
            staleness = policy_version - version
            if staleness > max_staleness:
                masked += length
                continue
            trained += length
            staleness_sum += staleness * length
            staleness_max = max(staleness_max, staleness) if length else staleness_max
    return StalenessCount(trained, masked, staleness_sum, staleness_max)
