"""Keeps prompts that are neither too easy nor too hard, by how often an earlier run passed them.

That run's pass rates are read once, and stored with the run that is prepared. The hash of its text
identifies a prompt.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from areal_flow.digests import sha256_hex
from areal_flow.errors import PromptError
from areal_flow.prompts.settings import DifficultySettings
from areal_flow.run.directory import check_schema_version, find_run
from areal_flow.run.layout import RunLayout
from areal_flow.store.queries import Run

_RATES = """
SELECT sha256(asked.prompt) AS prompt_hash, avg(passed::DOUBLE) AS pass_rate,
    count(*) AS num_samples
FROM trajectories JOIN (SELECT DISTINCT prompt_tokens, prompt FROM prompts) AS asked
    USING (prompt_tokens)
WHERE reward IS NOT NULL GROUP BY ALL ORDER BY ALL
"""


def prompt_pass_rates(run: Run) -> pa.Table:
    with closing(run.database()) as database:
        found: pa.Table = database.sql(_RATES).to_arrow_table()
    return found


class DifficultyFilter:
    def __init__(self, settings: DifficultySettings, layout: RunLayout) -> None:
        self._settings = settings
        self.counts = Counter[str]()
        """How many prompts were `kept`, `too easy`, `too hard` and `unseen`."""
        self._rates: dict[str, float] = {}
        if not settings.run:
            return
        parent = find_run(layout.root.parent, settings.run)
        rates = prompt_pass_rates(Run(parent.root))
        if not len(rates):
            raise PromptError(
                f"prompts.difficulty.run = {settings.run!r}: expected trajectories with a reward, "
                "found none there"
            )
        of = {"run": str(parent.root), "run_id": check_schema_version(parent)}
        layout.difficulty.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rates.replace_schema_metadata(of), layout.difficulty)
        self._rates = {
            row["prompt_hash"]: row["pass_rate"]
            for row in rates.to_pylist()
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
        lowest, highest = settings.pass_rates
        easy, hard = rate > highest, rate < lowest
        self.counts["too easy" if easy else "too hard" if hard else "kept"] += 1
        return not (easy or hard)

    def __str__(self) -> str:
        unseen = "kept, too" if self._settings.keep_unseen else "left out"
        said = ", ".join(f"{self.counts[name]} {name}" for name in ("kept", "too easy", "too hard"))
        of = f"by the pass rates of run {self._settings.run}"
        return f"{of}: {said}, {self.counts['unseen']} unseen ({unseen})" if self.counts else ""
