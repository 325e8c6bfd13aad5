"""One HTML page about a run: what it did, how fast, what the policy wrote, what went wrong.

The page is made from the run's directory, also while the run goes on, and loads nothing from
anywhere: charts are SVG within it. Completions are escaped, since a policy may write anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from areal_flow.config import load_recipe
from areal_flow.durable import replace_file
from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.pass_rates import tabulate
from areal_flow.recovery.run_directory import observed_state
from areal_flow.store.queries import Run
from areal_flow.store.samples import compared_answers
from pipelines.cli.tables import with_interval
from pipelines.report.charts import HeldOut, make_charts
from pipelines.report.events import find_events
from pipelines.summary import summarise

_TRAINED_SAMPLES = """
SELECT step, prompt, completion, reward, passed FROM trajectories
WHERE trajectory_id IN (
    SELECT trajectory_id FROM consumption WHERE status = 'trained' AND step IN (1, $newest)
    QUALIFY row_number() OVER (PARTITION BY step ORDER BY hash(trajectory_id)) <= 4
)
ORDER BY step, trajectory_id
"""


def write_report(layout: RunLayout, path: Path | None = None) -> Path:
    """Write the page of a run; return where it lies: by default `report.html` in the run.

    Raises:
        RunError: there is no run, or it was never prepared for training.
    """
    target = path or layout.report
    replace_file(target, report_page(Run(layout.root)))
    return target


def report_page(run: Run) -> str:
    """Return the page of a run as HTML.

    Raises:
        RunError: the run was never prepared for training.
    """
    layout = run.layout
    if not layout.steps.is_dir():
        raise RunError(
            f"expected a run that `areal-flow train` prepared, found no ledger in {layout.root}: "
            "a report is drawn from the ledger"
        )
    recipe = load_recipe(layout.config)
    table = run.steps("arrow").drop_columns(["trajectory_ids", "discarded"]).sort_by("step")
    steps = [row for row in table.to_pylist() if row["step"] > 0]
    evaluations = _evaluations(run)
    with closing(run.database()) as database:
        return render(
            run=layout.name,
            state=observed_state(layout),
            model=recipe.model,
            verifiers=[reward.verifier for reward in recipe.rewards],
            recipe=layout.config.read_text(),
            figures=_figures(table, evaluations, num_generators=recipe.cluster.num_generators),
            charts=make_charts(recipe, database, steps, evaluations) if steps else [],
            evaluations=evaluations,
            samples=_samples(run),
            trained_samples=_rows(database, _TRAINED_SAMPLES, newest=len(steps)),
            events=find_events(layout, steps, database),
        )


def render(**content: Any) -> str:
    """Return the page with everything escaped but the charts."""
    environment = Environment(
        loader=PackageLoader("pipelines.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made_at = datetime.now(UTC).astimezone()
    return environment.get_template("page.html").render(made_at=made_at, **content)


def _rows(database: Any, query: str, **values: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = database.sql(query, params=values).to_arrow_table().to_pylist()
    return found


def _samples(run: Run) -> list[dict[str, Any]]:
    """Return held-out answers before and after, if there are both."""
    if not run.layout.evaluations.is_dir():
        return []
    return compared_answers(run.evaluations("arrow"), pass_threshold=run.pass_threshold)


def _evaluations(run: Run) -> list[HeldOut]:
    """Return the held-out evaluations in their order: those of the verifier that scored last."""
    if not run.layout.evaluations.is_dir():
        return []
    rows = sorted(run.evaluations("arrow").to_pylist(), key=itemgetter("evaluated_at"))
    made: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["verifier"] == rows[-1]["verifier"]:
            made.setdefault((row["evaluation"], row["policy_version"]), []).append(row)
    return [
        HeldOut(name, version, tabulate(answers, threshold=run.pass_threshold))
        for (name, version), answers in made.items()
    ]


def _figures(ledger: Any, evaluations: Sequence[HeldOut], *, num_generators: int) -> dict[str, str]:
    """Return the numbers that stand first, by what they are called."""
    found = summarise({}, ledger, num_generators=num_generators)
    held_out = {
        f"{held_out} {label}, version {each.version}": with_interval(scores, name)
        for label, name in (("pass rate", "pass_rate"), ("mean reward", "reward_mean"))
        for each in _ends(evaluations)
        for held_out, scores in {"Held-out": each.found.overall, **each.found.several_sets}.items()
    }
    return {
        **held_out,
        "Training steps": "{num_steps:,} in {seconds_training:,.0f} s".format_map(found),
        "First policy": "{seconds_first_policy:,.0f} s".format_map(found),
        "Tokens a second": (
            "{tokens_per_second_generated:,.0f} generated, {tokens_per_second_trained:,.0f} trained"
        ).format_map(found),
        "Staleness": "mean {staleness_mean:.2f}, max {staleness_max}".format_map(found),
        "Masked tokens": "{masked_fraction:.2%}".format_map(found),
        "Overlap efficiency": "{overlap_efficiency:.2f}".format_map(found),
    }


def _ends(evaluations: Sequence[HeldOut]) -> list[HeldOut]:
    """Return the first and the last; one that is both, once."""
    return [*evaluations[:1], *evaluations[1:][-1:]]
