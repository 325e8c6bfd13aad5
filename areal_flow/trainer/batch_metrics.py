"""What a step's batch was: its rewards, what passed, how long completions are and how they ended.

Numbers of rows of the log alone, so that every rank and every replay finds the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any

import numpy as np

from areal_flow.evaluation.pass_rates import PASS_RATE, passes

PERCENTILES = (10, 50, 90)

Rows = Sequence[Mapping[str, Any]]


def batch_metrics(rows: Rows, *, pass_threshold: float) -> dict[str, float]:
    """Return metrics by the names that sinks show.

    Args:
        rows: of the trajectories, which all have a reward: `submission_index`, `source`,
            `difficulty`, `reward`, `reward_parts`, `finish_reason` and `output_tokens` of each.
    """
    rewards = [row["reward"] for row in rows]
    groups = _split(rows, "submission_index", rewards).values()
    passed = [float(passes(reward, threshold=pass_threshold)) for reward in rewards]
    lengths = [len(row["output_tokens"]) for row in rows]
    percentiles = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    return {
        PASS_RATE: fmean(passed),
        **_part_means(rows),
        **{
            f"pass_rate/{column}_{value}": fmean(part)
            for column in ("source", "difficulty")
            for value, part in sorted(_split(rows, column, passed).items())
            if value != ""
        },
        "rollout/reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "rollout/zero_variance_groups_fraction": fmean(len(set(group)) == 1 for group in groups),
        "rollout/truncated_fraction": fmean(row["finish_reason"] == "length" for row in rows),
        **{f"rollout/completion_p{share}_tokens": value for share, value in percentiles},
    }


def _part_means(rows: Rows) -> dict[str, float]:
    """Return the mean of each of several rewards before its weight, where it gave one."""
    parts: dict[str, list[float]] = defaultdict(list)
    for part in chain.from_iterable(row["reward_parts"] for row in rows):
        parts[part["name"]] += [] if part["reward"] is None else [part["reward"]]
    if len(parts) < 2:
        return {}
    named = {f"reward/{label}_mean": parts[name] for name, label in labels(parts).items()}
    return {name: fmean(rewards) for name, rewards in named.items() if rewards}


def labels(verifiers: Iterable[str]) -> dict[str, str]:
    """Return short names of verifiers: of the function, or of its module too where two are alike.

    Sinks allow letters, digits, dots, dashes and underscores in them.
    """
    short = {name: name.partition("@")[0].rpartition(":")[2] for name in verifiers}
    alike = Counter(short.values())
    return {
        name: label if alike[label] == 1 else re.sub(r"[^\w.-]", "-", name)
        for name, label in short.items()
    }


def _split(rows: Rows, column: str, values: Sequence[float]) -> dict[Any, list[float]]:
    """Return the rows' values by what a column has."""
    found: dict[Any, list[float]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        found[row[column]].append(value)
    return found
