"""How often a run passed each prompt; a run that is chosen by it keeps the rates as a file.

The hash of its text identifies a prompt.
"""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import check_schema_version, find_run
from areal_flow.log.queries import Run

_RATES = """
SELECT sha256(asked.prompt) AS prompt_hash, avg(passed::DOUBLE) AS pass_rate,
    count(*) AS num_samples
FROM trajectories JOIN (SELECT DISTINCT prompt_tokens, prompt FROM prompts) AS asked
    USING (prompt_tokens)
WHERE reward IS NOT NULL GROUP BY ALL ORDER BY ALL
"""


def prompt_pass_rates(run: Run) -> pa.Table:
    with closing(run.database()) as database:
        rates: pa.Table = database.sql(_RATES).to_arrow_table()
    return rates


def record_pass_rates(layout: RunLayout, earlier: str) -> None:
    """Write an earlier run's pass rates beside the prompts that they will choose.

    Args:
        earlier: the name or directory of that run.
    """
    parent = find_run(layout.root.parent, earlier)
    rates = prompt_pass_rates(Run(parent.root))
    if not len(rates):
        raise PromptError(
            f"prompts.difficulty.run = {earlier!r}: expected trajectories with a reward, found "
            "none there"
        )
    metadata = {"run": str(parent.root), "run_id": check_schema_version(parent)}
    layout.difficulty.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rates.replace_schema_metadata(metadata), layout.difficulty)
