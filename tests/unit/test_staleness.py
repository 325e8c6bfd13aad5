"""The bound on staleness, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from areal_flow.algorithms.staleness import (
    StalenessCount,
    count_staleness,
    fresh_enough,
    trained_mask,
)
from areal_flow.core.types import VersionSpan


def test_bound_is_inclusive() -> None:
    fresh = [fresh_enough(v, policy_version=5, max_staleness=2) for v in (2, 3, 4, 5)]
    assert fresh == [False, True, True, True]
    assert fresh_enough(5, policy_version=5, max_staleness=0)


def test_tokens_are_counted_by_their_age() -> None:
    spans = [
        [VersionSpan(1, 10), VersionSpan(3, 4), VersionSpan(4, 3)],
        [VersionSpan(2, 0), VersionSpan(5, 2)],
        [],
    ]
    count = count_staleness(spans, policy_version=5, max_staleness=2)
    assert count == StalenessCount(num_masked=10, num_trained_by_staleness={2: 4, 1: 3, 0: 2})
    assert (count.num_trained, count.staleness_max) == (9, 2)
    assert count.staleness_mean == 11 / 9


def test_span_without_tokens_has_no_age() -> None:
    spans = [[VersionSpan(3, 0), VersionSpan(4, 1)]]
    assert count_staleness(spans, policy_version=5, max_staleness=2).staleness_max == 1


def test_nothing_trained_has_no_staleness() -> None:
    count = count_staleness([[VersionSpan(0, 3)]], policy_version=5, max_staleness=2)
    assert count == StalenessCount(num_masked=3)
    assert count.staleness_mean == 0.0


def test_token_is_trained_if_it_is_fresh_and_was_chosen() -> None:
    spans = (VersionSpan(2, 2), VersionSpan(3, 0), VersionSpan(4, 3))
    chosen = np.array([True, False, True, False, True])
    masks = [
        trained_mask(spans, chosen, policy_version=5, max_staleness=bound).tolist()
        for bound in (3, 2, 0)
    ]
    assert masks == [chosen.tolist(), [False, False, True, False, True], [False] * 5]
    nothing = np.zeros(0, np.bool_)
    assert trained_mask((), nothing, policy_version=5, max_staleness=2).tolist() == []


def test_mask_of_another_length_than_its_spans_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        trained_mask([VersionSpan(2, 3)], np.ones(2, np.bool_), policy_version=2, max_staleness=0)
