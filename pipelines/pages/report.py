"""One HTML page about a run: whether it is healthy, what the policy wrote, how it went.

The page is computed from the run's directory, also while the run goes on, and loads nothing: charts
are inline SVG. Completions are escaped, since a policy may write anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined

from areal_flow.config import Recipe
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import leases
from areal_flow.core.pass_rates import PASS_RATE, PassRate, tabulate, wilson_interval
from areal_flow.core.types import ENGINE_GAP
from areal_flow.flow.diagnosis import REMEDIES, find_bottleneck, is_wide
from areal_flow.log.database import compared_answers
from areal_flow.log.directory import observed_state
from areal_flow.log.queries import Run
from areal_flow.rewards.protocol import part_names
from pipelines.console.run_log import logged_warnings
from pipelines.console.summary import summarise
from pipelines.console.tables import printable, with_interval
from pipelines.costs import amount, costs_of
from pipelines.pages.charts import (
    WINDOW_STEPS,
    Evaluation,
    Interval,
    compare_charts,
    make_charts,
)

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
Mark = Literal["good", "look", "bad", "open"]
Rows = Sequence[Mapping[str, Any]]
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
    """Write the page and return its path, by default `report.html` in the run directory.

    Args:
        against: a second run to compare with.
        prices: per hour; they override those of the recipes.
    """
    target, run = path or layout.report, Run(layout.root)
    entry = _read(run, prices)
    entries = [entry, *([_read(Run(against.root), prices)] if against else [])]
    recipe, steps, totals = entry["recipe"], entry["steps"], entry["totals"]
    answers = run.evaluations("arrow") if layout.evaluations.exists() else None
    evaluations = score_evaluations(answers, run) if answers else []
    passed = [table.overall.passed for _, table in evaluations]
    first_charts, other_charts = make_charts(steps, evaluations) if steps else ([], [])
    compared = compare_charts({e["run"]: e["steps"] for e in entries}) if against else []
    with closing(run.database()) as database:
        page = render(
            "pages/report.html",
            made_at=datetime.now(UTC).astimezone(),
            run=layout.name,
            state=observed_state(layout),
            recipe=recipe,
            rewards=part_names(recipe.rewards) or ["the agent's"],
            recipe_text=layout.config.read_text(),
            totals=totals,
            entries=entries,
            side_by_side=compared,
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
    replace_file(target, page)
    return target


def _read(run: Run, prices: Mapping[str, float] | None) -> dict[str, Any]:
    """Return steps, token accounting, cost and lineage of a run."""
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
    """Render a template; everything but the charts is escaped."""
    return _TEMPLATES.get_template(template).render(**content)


def score_evaluations(answers: pa.Table, run: Run) -> list[Evaluation]:
    rows = sorted(answers.to_pylist(), key=itemgetter("evaluated_at"))
    by_evaluation: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["verifier"] == rows[-1]["verifier"]:
            key = row["evaluation"], row["policy_version"]
            by_evaluation.setdefault(key, []).append(row)
    return [
        (version, tabulate(group, threshold=run.pass_threshold))
        for (_, version), group in by_evaluation.items()
    ]


def held_out_rates(run: Run) -> list[Interval]:
    """Return the pass rate of each evaluation with its 95% interval, by policy version."""
    if not run.layout.evaluations.exists():
        return []
    scored = score_evaluations(run.evaluations("arrow", columns=_SCORED), run)
    rates = [(version, table.overall.passed) for version, table in scored]
    return sorted((version, rate.pass_rate, rate.low, rate.high) for version, rate in rates)


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
_MAX_WARNINGS = 100


def find_events(
    layout: RunLayout, steps: Rows, forks: Rows, database: Any
) -> Iterator[tuple[str, str]]:
    for lease in leases(layout.writers):
        driver = f"driver {lease.writer_epoch} began: process {lease.pid} on {lease.host}"
        yield _local(lease.since), driver
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
    yield from logged_warnings(layout.log)[:_MAX_WARNINGS]


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


MIN_ENTROPY = 0.1
"""Fraction of the first entropy; below it nearly all completions of a prompt are the same."""
MAX_ENTROPY = 2.0
"""Multiple of the first entropy; a policy that learns becomes more certain, so a rise is odd."""
MAX_EQUAL_GROUPS = 0.5
"""Fraction of groups; a group whose rewards are all equal teaches nothing."""
MAX_MASKED = 0.1
"""Fraction of tokens; those too old to train were generated in vain."""
MAX_TRUNCATED = 0.1
"""Fraction of completions; a truncated one scores as wrong, whatever it would have become."""
MAX_FAILED = 0.05
"""Fraction of completions; about one in each group of 16."""


@dataclass(frozen=True, slots=True)
class Verdict:
    subject: str
    mark: Mark
    text: str
    detail: str


def judge_run(
    recipe: Recipe, steps: Rows, totals: Mapping[str, Any], held_out: Sequence[PassRate]
) -> list[Verdict]:
    """Return the verdicts on a run that has trained.

    Rewards are compared over the steps that the last verifier scored.

    Args:
        steps: rows of the ledger from step 1 on.
        totals: of the run, as `summarise` returns them.
        held_out: pass rates of the evaluations; with fewer than two, batches are compared.
    """
    comparable = [row for row in steps if row.get("verifier") == steps[-1].get("verifier")]
    subject, rates = "Held-out pass rate", held_out
    if len(held_out) < 2:
        subject, rates = "Pass rate of batches", batch_pass_rates(recipe, comparable)
    equal_groups = mean_of(comparable, "rollout/zero_variance_groups_fraction") or 0.0
    verdicts = [judge_pass_rate(rates, subject, equal_groups=equal_groups)] if rates else []
    first, last = ends(steps, "entropy_mean")
    if first is not None and last is not None:
        verdicts.append(judge_entropy(first, last))
    if any(row.get("step_s") for row in steps):
        text, remedy = find_bottleneck(steps, num_generators=recipe.cluster.num_generators)
        verdicts.append(Verdict("Speed", "look" if remedy else "good", text, remedy))
    mean, limit = totals["staleness_mean"], recipe.controller.max_staleness
    return [
        *verdicts,
        *judge_engine_gap(steps),
        judge_staleness(mean, limit, masked=totals["masked_fraction"]),
        judge_failures(
            totals["num_failed_members"] / (len(steps) * recipe.controller.batch_size),
            truncated=ends(steps, "rollout/truncated_fraction")[1] or 0.0,
            skipped=mean_of(steps, "skipped_updates_fraction") or 0.0,
        ),
    ]


def judge_pass_rate(rates: Sequence[PassRate], subject: str, *, equal_groups: float) -> Verdict:
    first, last = rates[0], rates[-1]
    moved = f"from {first.pass_rate:.2f} to {last.pass_rate:.2f}"
    mark: Mark = "open"
    text = f"{subject} went {moved}: no clear difference"
    if last.low > first.high:
        mark, text = "good", f"{subject} rose {moved}"
    elif last.high < first.low:
        mark, text = "bad", f"{subject} fell {moved}"
    detail = f"95%: {first.low:.3f} to {first.high:.3f}, then {last.low:.3f} to {last.high:.3f}"
    if equal_groups > MAX_EQUAL_GROUPS:
        mark = "look" if mark == "open" else mark
        detail += f"; {equal_groups:.0%} of groups taught nothing: their rewards were equal"
    return Verdict("Pass rate", mark, text, detail)


def judge_entropy(first: float, last: float) -> Verdict:
    verb = "rose" if last > first else "fell"
    moved = f"{verb} from {first:.2f} to" if f"{first:.2f}" != f"{last:.2f}" else "stayed at"
    mark: Mark = "good"
    meaning = "still exploring"
    if last < MIN_ENTROPY * first:
        mark, meaning = "bad", "the policy stopped exploring"
    elif last > MAX_ENTROPY * first:
        mark, meaning = "look", "the policy may forget what it could"
    return Verdict("Entropy", mark, f"Entropy {moved} {last:.2f}: {meaning}", "nats a token")


def judge_staleness(mean: float, limit: int, *, masked: float) -> Verdict:
    detail = f"{masked:.1%} of tokens were too old to train"
    mark: Mark = "look" if masked > MAX_MASKED else "good"
    return Verdict("Staleness", mark, f"Mean staleness {mean:.1f} of at most {limit}", detail)


def judge_engine_gap(steps: Rows) -> list[Verdict]:
    """Return a verdict on engine and trainer, if the engine's version was ever the trainer's."""
    difference = mean_of(steps, f"{ENGINE_GAP}logprob_difference_mean")
    if difference is None:
        return []
    mark: Mark = "good"
    text = f"Engine and trainer differ by {difference:.2g} nats a token with the same weights"
    kl = mean_of(steps, f"{ENGINE_GAP}kl") or 0.0
    measured = [row for row in steps if row.get(f"{ENGINE_GAP}tokens")]
    detail = f"KL divergence {kl:.2g} nats a token; {len(measured)} of {len(steps)} steps had "
    detail += "tokens of the policy before the step"
    if wide := sum(map(is_wide, steps)):
        mark = "bad" if is_wide(measured[-1]) else "look"
        text, detail = (
            f"{text}: too much in {wide} of {len(measured)} steps",
            f"{detail}; {REMEDIES}",
        )
    return [Verdict("Engine", mark, text, detail)]


def judge_failures(failed: float, *, truncated: float, skipped: float) -> Verdict:
    mark: Mark = "look" if failed or truncated > MAX_TRUNCATED else "good"
    mark = "bad" if failed > MAX_FAILED or skipped else mark
    text = f"{failed:.1%} of completions failed" if failed else "No completion failed"
    updates = f"{skipped:.1%} of updates were skipped" if skipped else "no update was skipped"
    detail = f"{truncated:.1%} are cut at the length limit; {updates}"
    return Verdict("Failures", mark, text, detail)


def batch_pass_rates(recipe: Recipe, steps: Rows) -> list[PassRate]:
    """Return the pass rates of the first and the last steps, with intervals over their prompts."""
    n = recipe.groups_per_step * _window(steps)
    rates = ends(steps, PASS_RATE)
    return [wilson_interval(round(rate * n), n) for rate in rates if rate is not None]


def ends(steps: Rows, name: str) -> tuple[float | None, float | None]:
    return mean_of(steps[: _window(steps)], name), mean_of(steps[-_window(steps) :], name)


def mean_of(steps: Rows, name: str) -> float | None:
    values = [row[name] for row in steps if row.get(name) is not None]
    return fmean(values) if values else None


def _window(steps: Rows) -> int:
    return max(1, min(WINDOW_STEPS, len(steps) // 2))
