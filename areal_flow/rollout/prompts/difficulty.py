"""Keeps prompts that are neither too easy nor too hard, by how often an earlier run passed them.

The hash of its text identifies a prompt.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from areal_flow.core.digests import sha256_hex
from areal_flow.rollout.prompts.settings import DifficultySettings


class DifficultyFilter:
    def __init__(self, settings: DifficultySettings, recorded: Path) -> None:
        """`recorded` is a Parquet file of the earlier run's pass rates, read if one is named."""
        self._settings = settings
        self.counts = Counter[str]()
        """How many prompts were `kept`, `too easy`, `too hard` and `unseen`."""
        rows = pq.read_table(recorded).to_pylist() if settings.run else []
        self._rates = {
            row["prompt_hash"]: row["pass_rate"]
            for row in rows
            if row["num_samples"] >= settings.min_samples
        }

    def __call__(self, row: dict[str, Any]) -> bool:
        settings = self._settings
        if not settings.run:
            return True
        rate = self._rates.get(sha256_hex(row["prompt"]))
        if rate is None:
            self.counts["unseen"] += 1
            return settings.keep_unseen
        lowest, highest = settings.pass_rate_range
        easy, hard = rate > highest, rate < lowest
        self.counts["too easy" if easy else "too hard" if hard else "kept"] += 1
        return not (easy or hard)

    def __str__(self) -> str:
        unseen = "kept, too" if self._settings.keep_unseen else "left out"
        counted = ", ".join(
            f"{self.counts[name]} {name}" for name in ("kept", "too easy", "too hard")
        )
        of = f"by the pass rates of run {self._settings.run}"
        return f"{of}: {counted}, {self.counts['unseen']} unseen ({unseen})" if self.counts else ""
