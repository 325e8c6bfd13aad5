"""Groups, comparisons and lineage as HTML, and rows as a file; the templates escape every text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from itertools import groupby
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from areal_flow.core.errors import ConfigError
from areal_flow.log.browsing import ShownToken, ShownTrajectory
from areal_flow.log.database import compared_answers
from areal_flow.log.groups import GroupSelection, condition
from areal_flow.log.queries import Run
from pipelines.console.table_file import write_table_file
from pipelines.report import page
from pipelines.report.charts import COLOURS

COLOUR_BY = ("policy version", "log-prob", "staleness", "advantage", "importance weight")
FORMATS = (".parquet", ".csv", ".jsonl")
MOST_ROWS = 10_000
MOST_TOKENS = 24_000
"""Of a group; a browser is slow with more."""


def render(template: str, **content: Any) -> str:
    given = {"stretches": stretches, "from_json": json.loads, "colours": COLOURS}
    return page.render(f"view/templates/{template}", most_tokens=MOST_TOKENS, **given, **content)


def stretches(member: ShownTrajectory, colour_by: str, max_tokens: int) -> list[tuple[Any, ...]]:
    """Return style, title, whether it is masked, and text of tokens that look alike."""
    looks = ((*_look(n, t, member, colour_by), t) for n, t in enumerate(member.tokens[:max_tokens]))
    grouped = groupby(looks, key=lambda look: look[:3])
    return [(*look, "".join(token.text for *_, token in same)) for look, same in grouped]


def _look(place: int, token: ShownToken, member: ShownTrajectory, by: str) -> tuple[str, str, bool]:
    masked = token.trained is False or not token.chosen
    advantage = member.batch.advantage if member.batch else None
    if not token.chosen:
        return "", "not the policy's choice", masked
    match by:
        case "policy version":
            colour = COLOURS[token.version % len(COLOURS)]
            return f"background: {colour}44", f"version {token.version}", masked
        case "log-prob":
            text = f"log-prob {token.logprob:.3f}, probability {exp(token.logprob):.3f}"
            return _shade("bad", 1 - exp(token.logprob)), text, masked
        case "staleness" if token.staleness is not None:
            return _shade("bad", token.staleness / 8), f"{token.staleness} versions old", masked
        case "advantage" if advantage is not None and not masked:
            value = float(np.broadcast_to(advantage, len(member.tokens))[place])
            return _shade("good" if value > 0 else "bad", abs(value)), f"{value:+.4g}", masked
    return "", "", masked


def _shade(mark: str, strength: float) -> str:
    percent = 5 * round(14 * min(1.0, strength))
    return f"background: color-mix(in srgb, var(--{mark}) {percent}%, transparent)"


def compare(*both: tuple[Run, int]) -> list[dict[str, Any]]:
    """Return answers of two policy versions to the same held-out prompts, some a difficulty."""
    answers = []
    for place, (run, version) in enumerate(both):
        evaluations = run.evaluations("polars", where=f"policy_version = {version}")
        moment = pl.lit(place).cast(evaluations.schema["evaluated_at"]).alias("evaluated_at")
        answers.append(evaluations.with_columns(moment, policy_version=place))
    return compared_answers(pl.concat(answers).to_arrow(), pass_threshold=run.pass_threshold)


def export(runs: Sequence[Run], chosen: GroupSelection, ending: str) -> BytesIO:
    """Return the trajectories that match, with the names of their runs, as a file's content."""
    tables: list[pa.Table] = []
    for run in runs:
        matching = run.trajectories("duckdb", text=True, where=condition(run, chosen))
        rows = matching.limit(MOST_ROWS + 1).to_arrow_table().sort_by("trajectory_id")
        if len(rows) > MOST_ROWS:
            raise ConfigError(
                f"expected at most {MOST_ROWS:,} rows of a run to export, found more: narrow "
                f"the condition, or use areal-flow trajectories {run.layout.name} --to FILE"
            )
        tables.append(rows.add_column(0, "run", pa.array([run.layout.name] * len(rows), "str")))
    with TemporaryDirectory(prefix="areal-flow-view-") as folder:
        path = Path(folder) / f"rows{ending}"
        write_table_file(path, tables, tables[0].schema)
        return BytesIO(path.read_bytes())
