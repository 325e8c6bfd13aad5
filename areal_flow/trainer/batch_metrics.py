"""What a step's batch was: its rewards, what passed, how long completions are and how they ended.

Numbers of rows of the log alone, so that every rank and every replay finds the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from areal_flow.pass_rates import PASS_RATE, passes

PERCENTILES = (10, 50, 90)

Rows = Sequence[Mapping[str, Any]]


def batch_metrics(rows: Rows, *, pass_threshold: float) -> dict[str, float]:
    """Return metrics by the names that sinks show.

    Args:
        rows: of the trajectories, which all have a reward: `submission_index`, `difficulty`,
            `reward`, `finish_reason` and `output_tokens` of each.
    """
    rewards = [row["reward"] for row in rows]
    groups = _split(rows, "submission_index", rewards).values()
    passed = [float(passes(reward, threshold=pass_threshold)) for reward in rewards]
    lengths = [len(row["output_tokens"]) for row in rows]
    percentiles = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    return {
        PASS_RATE: fmean(passed),
        **{
            f"pass_rate/difficulty_{difficulty}": fmean(part)
            for difficulty, part in sorted(_split(rows, "difficulty", passed).items())
        },
        "rollout/reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "rollout/zero_variance_groups_fraction": fmean(len(set(group)) == 1 for group in groups),
        "rollout/truncated_fraction": fmean(row["finish_reason"] == "length" for row in rows),
        **{f"rollout/completion_p{share}_tokens": value for share, value in percentiles},
    }


def _split(rows: Rows, column: str, values: Sequence[float]) -> dict[int, list[float]]:
    """Return the rows' values by what a column has."""
    found: dict[int, list[float]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        found[row[column]].append(value)
    return found
