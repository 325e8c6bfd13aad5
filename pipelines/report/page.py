"""One HTML page about a run: whether it is healthy, what the policy wrote, how it went.

The page is made from the run's directory, also while the run goes on, and loads nothing from
anywhere: charts are SVG within it. Completions are escaped, since a policy may write anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined

from areal_flow.core.durable import replace_file
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import leases
from areal_flow.core.pass_rates import tabulate
from areal_flow.log.database import compared_answers
from areal_flow.log.directory import observed_state
from areal_flow.log.queries import Run
from areal_flow.rewards.protocol import part_names
from pipelines.console.run_log import logged_warnings
from pipelines.console.tables import printable, with_interval
from pipelines.costs import amount, costs_of
from pipelines.report.charts import Evaluation, Interval, compare_charts, make_charts
from pipelines.report.summary import summarise
from pipelines.report.verdicts import judge_run

_TEMPLATES = Environment(
    loader=PackageLoader("pipelines", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"printable": printable, "amount": amount}
_SCORED = (
    *("evaluation", "policy_version", "verifier", "evaluated_at", "held_out", "prompt_id"),
    *("sample", "difficulty", "reward", "reward_detail", "num_output_tokens"),
)
Row = Mapping[str, Any]
_TRAINED_SAMPLES = """
SELECT step, prompt, completion, reward, passed FROM trajectories
WHERE trajectory_id IN (
    SELECT trajectory_id FROM consumption WHERE status = 'trained' AND step IN (1, $newest)
    QUALIFY row_number() OVER (PARTITION BY step ORDER BY hash(trajectory_id)) <= 4
)
ORDER BY step, trajectory_id
"""


def write_report(
    layout: RunLayout,
    path: Path | None = None,
    *,
    against: RunLayout | None = None,
    prices: Mapping[str, float] | None = None,
) -> Path:
    """Write the page of a run; return where it lies: by default `report.html` in the run.

    Args:
        against: another run, to be shown beside it.
        prices: of an hour, over those of the recipes.
    """
    target, other = path or layout.report, Run(against.root) if against else None
    replace_file(target, report_page(Run(layout.root), other, prices=prices))
    return target


def report_page(
    run: Run, other: Run | None = None, *, prices: Mapping[str, float] | None = None
) -> str:
    layout, entry = run.layout, _read(run, prices)
    recipe, steps, totals = entry["recipe"], entry["steps"], entry["totals"]
    answers = run.evaluations("arrow") if layout.evaluations.exists() else None
    evaluations = score_evaluations(answers, run) if answers else []
    passed = [table.overall.passed for _, table in evaluations]
    first_charts, other_charts = make_charts(steps, evaluations) if steps else ([], [])
    entries = [entry, *([_read(other, prices)] if other else [])]
    with closing(run.database()) as database:
        return render(
            "report/page.html",
            made_at=datetime.now(UTC).astimezone(),
            run=layout.name,
            state=observed_state(layout),
            recipe=recipe,
            rewards=part_names(recipe.rewards) or ["the agent's"],
            recipe_text=layout.config.read_text(),
            totals=totals,
            entries=entries,
            side_by_side=compare_charts({e["run"]: e["steps"] for e in entries}) if other else [],
            verdicts=judge_run(recipe, steps, totals, passed) if steps else [],
            samples=compared_answers(answers, pass_threshold=run.pass_threshold) if answers else [],
            evaluations=evaluations,
            scores=_scores(evaluations),
            first_charts=first_charts,
            other_charts=other_charts,
            trained_samples=database.sql(_TRAINED_SAMPLES, params={"newest": len(steps)})
            .to_arrow_table()
            .to_pylist(),
            events=[*find_events(layout, steps, entry["lineage"]["forks"], database)],
        )


def _read(run: Run, prices: Mapping[str, float] | None) -> dict[str, Any]:
    """Return what a run's ledger says: books, cost and lineage are made of it."""
    if not run.layout.steps.exists():
        raise RunError(
            f"expected a run that `areal-flow train` prepared, found no ledger in "
            f"{run.layout.root}: a report is drawn from the ledger"
        )
    recipe = run.recipe
    table = run.steps("arrow").drop_columns(["trajectory_ids", "discarded"])
    steps = [row for row in table.to_pylist() if row["step"] > 0]
    kinds = ("generated", "trained", "masked", "discarded")
    tokens = {kind: sum(row[f"num_{kind}_tokens"] for row in steps) for kind in kinds}
    return {
        "run": run.layout.name,
        "recipe": recipe,
        "steps": steps,
        "totals": summarise({}, table, num_generators=recipe.cluster.num_generators),
        "tokens": {**tokens, "waiting": steps[-1]["num_waiting_tokens"] if steps else 0},
        "costs": costs_of(run, prices)[0] if run.layout.workers.is_file() else None,
        "lineage": run.lineage(len(steps)).summary(),
    }


def render(template: str, **content: Any) -> str:
    """Return a page, or a part of one, with everything escaped but the charts."""
    return _TEMPLATES.get_template(template).render(**content)


def score_evaluations(answers: pa.Table, run: Run) -> list[Evaluation]:
    rows = sorted(answers.to_pylist(), key=itemgetter("evaluated_at"))
    made: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["verifier"] == rows[-1]["verifier"]:
            made.setdefault((row["evaluation"], row["policy_version"]), []).append(row)
    return [
        (version, tabulate(answers, threshold=run.pass_threshold))
        for (_, version), answers in made.items()
    ]


def held_out_rates(run: Run) -> list[Interval]:
    """Return the pass rate of each evaluation with its 95% interval, by policy version."""
    if not run.layout.evaluations.exists():
        return []
    scored = score_evaluations(run.evaluations("arrow", columns=_SCORED), run)
    rates = [(at, table.overall.passed) for at, table in scored]
    return sorted((at, rate.pass_rate, rate.low, rate.high) for at, rate in rates)


def _scores(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    return [
        {
            "version": version,
            "set": name,
            "prompts": scores.passed.n,
            "pass rate": with_interval(scores, "pass_rate"),
            "mean reward": with_interval(scores, "reward_mean"),
            "mean tokens": f"{scores.mean_tokens:.1f}",
        }
        for version, table in evaluations
        for name, scores in {"all": table.overall, **table.several_sets}.items()
    ]


_DISCARDS = """
SELECT reason, count(*) FROM consumption WHERE status = 'discarded' GROUP BY reason ORDER BY reason
"""
_MOST_WARNINGS = 100


def find_events(
    layout: RunLayout, steps: Sequence[Row], forks: Sequence[Row], database: Any
) -> Iterator[tuple[str, str]]:
    for of in leases(layout.writers):
        yield _local(of.since), f"driver {of.writer_epoch} began: process {of.pid} on {of.host}"
    for row in steps:
        if given_up := ", ".join(map(str, row["failed_submissions"])):
            yield f"step {row['step']}", f"groups given up: {given_up}"
    for before, row in pairwise(steps):
        if (verifier := row["verifier"]) != before["verifier"]:
            yield f"step {row['step']}", f"another verifier scored from here on: {verifier}"
    for reason, count in database.sql(_DISCARDS).fetchall():
        yield "all steps", f"{count:,} trajectories discarded: {reason}"
    for fork in forks:
        yield _local(fork["at"]), f"step {fork['step']} was replayed to another policy"
    yield from logged_warnings(layout.log)[:_MOST_WARNINGS]


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
