"""What commands print of audits, evaluations, lists of runs, lineages and difficulties."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import newest_lease
from areal_flow.core.machine import return_freed_memory
from areal_flow.core.pass_rates import EvaluationScores, PairedComparison
from areal_flow.log.audit.run import check_run
from areal_flow.log.directory import list_runs, observed_state
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.lineage import HashCheck, Lineage
from areal_flow.log.queries import Run, prompt_pass_rates
from pipelines.console.progress import make_progress
from pipelines.console.tables import Report, Table, facts, samples_text, short_time, with_interval
from pipelines.models import Traced

if TYPE_CHECKING:
    from pipelines.jobs.evaluate import EvaluationResult

_BARS = 30
_LAST_STEPS = 5
_MAX_ROWS = 12


def report_check(layout: RunLayout, *, full: bool) -> Report:
    progress = make_progress(to_stderr=True)
    return_freed_memory()
    try:
        audit = check_run(layout, full=full, on_progress=partial(progress.count, "trajectories"))
    finally:
        progress.close()
    data = audit.as_json()
    checked = ", ".join(f"{count} {kind}" for kind, count in audit.checked.items()) or "nothing"
    labels = ("", "rule", "where", "expected", "actual", "what to do")
    rows = [dict(zip(labels, (f.severity, *f[:5]), strict=True)) for f in audit.findings]
    table = Table(rows, prose=labels[2:])
    last = f"{audit.run}: {audit.verdict}. Checked: {checked}"
    if before := audit.verified_before:
        last += (
            "; {trajectories} trajectories up to step {step} were verified at {at}, --full reads "
            "them again"
        ).format(**before)
    return Report(data, [*([table] if audit.findings else []), last], code=int(not audit.clean))


def report_evaluation(result: EvaluationResult) -> Report:
    """Report pass rates and mean rewards by held-out set or, if there is one, by difficulty."""
    evaluated = result.table
    label, parts = evaluated.parts
    rows = {**(parts if len(parts) > 1 else {}), "all": evaluated.overall}
    shown = [{label: part, **_scores(scores)} for part, scores in rows.items()]
    table = Table(shown, f"{result.title}: held-out prompts, {samples_text(evaluated.overall)}")
    data = {
        "model": result.title,
        "policy_version": result.policy_version,
        "overall": evaluated.overall.as_json(),
        "by_set": {name: scores.as_json() for name, scores in evaluated.by_set.items()},
        "by_difficulty": [
            {"difficulty": difficulty, **scores.as_json()}
            for difficulty, scores in evaluated.by_difficulty.items()
        ],
    }
    return Report(data, [table])


def _scores(scores: EvaluationScores) -> dict[str, Any]:
    return {
        "prompts": scores.passed.n,
        "pass rate, 95%": with_interval(scores, "pass_rate"),
        "mean reward, 95%": with_interval(scores, "reward_mean"),
        "mean tokens": f"{scores.mean_tokens:.1f}",
    }


def report_comparison(
    compared: PairedComparison,
    by_set: Mapping[str, PairedComparison],
    first: EvaluationResult,
    second: EvaluationResult,
) -> Report:
    results = (first, second)
    if len(by_set) > 1:
        shown = [
            {"set": name, "model": result.title, **_scores(result.table.by_set[name])}
            for name in by_set
            for result in results
        ]
        lines = [f"{name}: {_compared(of)}" for name, of in [*by_set.items(), ("all", compared)]]
    else:
        shown = [{"model": result.title, **_scores(result.table.overall)} for result in results]
        lines = [_compared(compared)]
    data = {
        "models": [
            {
                "model": result.title,
                "policy_version": result.policy_version,
                **result.table.overall.as_json(),
                "by_set": {name: of.as_json() for name, of in result.table.by_set.items()},
            }
            for result in results
        ],
        "comparison": compared.as_json(),
        "by_set": {name: of.as_json() for name, of in by_set.items()},
    }
    title = f"held-out prompts, {samples_text(second.table.overall)}"
    return Report(data, [Table(shown, title), *lines])


def _compared(compared: PairedComparison) -> str:
    return (
        f"{compared.difference:+.3f} ({compared.low:+.3f} to {compared.high:+.3f}): better on "
        f"{compared.num_better} of {compared.num_prompts} prompts, worse on {compared.num_worse}, "
        f"p = {compared.p_value:.2g} (exact, paired)"
    )


def report_runs(runs: Path) -> Report:
    listed = [_run(layout) for layout in list_runs(runs)]
    if not listed:
        return Report({"runs": []}, [f"no runs in {runs}"])
    shown = [name for name in listed[0] if name != "reason" or any(run[name] for run in listed)]
    rows = [
        {
            **{name: run[name] for name in shown},
            "pass rate": "→".join(f"{rate:.3f}" for rate in run["pass rate"]) or None,
            "since": run["since"] and short_time(datetime.fromisoformat(run["since"])),
        }
        for run in listed
    ]
    table = Table(rows, texts=[name for name in shown if name == "reason"])
    return Report({"runs": listed}, [table])


def _run(layout: RunLayout) -> dict[str, Any]:
    observed, lease = observed_state(layout), newest_lease(layout.writers)
    num_steps, rates = None, []
    if layout.steps.exists():
        num_steps = max(0, LedgerReader(layout).head)
    if layout.summary.is_file():
        summary = json.loads(layout.summary.read_text())
        held_out = [summary["held_out_before"], summary["held_out_after"]]
        rates = [rate["pass_rate"] for rate in held_out] if all(held_out) else []
    return {
        "run": layout.name,
        "state": observed.state,
        "steps": num_steps,
        "pass rate": rates,
        "since": lease.since if lease else None,
        "reason": observed.reason,
    }


def report_lineage(traced: Traced) -> Report:
    summary, version = traced.lineage.summary(), traced.registered
    named = version and {"name": version.name, "version": version.version, "tags": version.tags}
    checks = [{**asdict(check), "holds": check.holds} for check in traced.checks]
    parts: list[RenderableType] = [facts(_facts({**summary, "registered": named}))]
    if summary["version"] > 0:
        parts += [_steps(traced.lineage), _policy_versions(summary["policy_versions"])]
    parts += ["", *(_check_line(check) for check in traced.checks)]
    code = int(not all(check.holds for check in traced.checks))
    return Report({"registered": named, **summary, "checks": checks}, parts, code)


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    named = summary["registered"]
    forks = ", ".join(str(fork["step"]) for fork in summary["forks"])
    forked = f"replayed to other weights, where replay does not repeat bits: steps {forks}"
    environments = [
        {**record, "text": ", ".join(f"{k} {v}" for k, v in record["numeric_environment"].items())}
        for record in summary["numeric_environments"]
    ]
    return [
        *([("registered", f"models:/{named['name']}/{named['version']}")] if named else []),
        ("policy", f"version {summary['version']} of run {summary['run']}"),
        ("weights", summary["weights_hash"]),
        ("chain", _chain(summary)),
        *(("forked from", _ancestor(parent)) for parent in summary["forked_from"]),
        ("steps", str(summary["num_steps"])),
        ("trajectories", f"{summary['num_trajectories']:,}, of {summary['num_prompts']:,} prompts"),
        (
            "tokens",
            f"{summary['num_trained_tokens']:,} trained, {summary['num_masked_tokens']:,} not: too "
            "old, or the environment's",
        ),
        ("dataset", f"{summary['trajectory_watermark']:,} trajectories in the log"),
        ("verifier", _spans(summary["verifiers"], "verifier") or "none"),
        ("chat template", summary["chat_template"] or "none"),
        ("config", _spans(summary["config_hashes"], "config_hash")),
        ("code", _spans(summary["code_versions"], "code_version")),
        ("writer epoch", _spans(summary["writer_epochs"], "writer_epoch")),
        ("environment", _spans(environments, "text")),
        ("forks", forked if forks else "none"),
    ]


def _chain(summary: dict[str, Any]) -> str:
    breaks = summary["chain_breaks"]
    broken = f"broken before step {', '.join(map(str, breaks))}" if breaks else "unbroken"
    return f"from the genesis {summary['genesis_hash']}, {broken}"


def _ancestor(parent: dict[str, Any]) -> str:
    ledger = parent["ledger"]
    renamed = f", now {ledger['run']}" if ledger and ledger["run"] != parent["name"] else ""
    chain = f"chain {_chain(ledger)}" if ledger else "that run is not there any more"
    return (
        f"step {parent['step']} of run {parent['name']}{renamed}, optimizer {parent['optimizer']}; "
        f"weights {parent['weights_hash']}, {chain}"
    )


def _spans(records: Sequence[dict[str, Any]], name: str) -> str:
    if len(records) == 1:
        return str(records[0][name])
    return "\n".join(f"{r[name]} (steps {r['first_step']} to {r['last_step']})" for r in records)


def _steps(lineage: Lineage) -> Table:
    steps = lineage.steps.iloc[1:]
    some = f"the last {_LAST_STEPS} of {len(steps)} steps"
    rows = [
        {
            "step": row.step,
            "from": f"v{row.policy_version}",
            "reward": f"{row.reward_mean:.3f}",
            "trained": f"{row.num_trained_tokens:,}",
            "not trained": f"{row.num_masked_tokens:,}",
            "loss": f"{row.loss:.4f}",
            "weights": row.weights_hash[:12],
            "parent": row.parent_hash[:12],
            "committed": short_time(row.committed_at.to_pydatetime()),
        }
        for row in steps.tail(_LAST_STEPS).itertuples()
    ]
    return Table(rows, some if len(steps) > _LAST_STEPS else "its steps")


def _policy_versions(records: Sequence[dict[str, Any]]) -> Table:
    buckets = bucketed(records)
    max_trained = max([1, *(trained for _, trained, _ in buckets)])
    rows = [
        {
            "version": versions,
            "trained": f"{trained:,}",
            "not trained": f"{masked:,}",
            "": "█" * round(_BARS * trained / max_trained),
        }
        for versions, trained, masked in buckets
    ]
    return Table(rows, "its tokens by the policy version that sampled them")


def bucketed(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Sum neighbouring versions until a screen holds them; label each sum with its range."""
    size = max(1, -(-len(records) // _MAX_ROWS))
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    return [
        (
            " to ".join(dict.fromkeys(str(part[at]["version"]) for at in (0, -1))),
            sum(record["num_trained_tokens"] for record in part),
            sum(record["num_masked_tokens"] for record in part),
        )
        for part in parts
    ]


def _check_line(check: HashCheck) -> Text:
    if check.holds:
        return Text(f"✓ {check.what} has the weights hash of the ledger", "green")
    return Text(
        f"✗ {check.what} has weights {check.actual}, the ledger {check.expected}", "bold red"
    )


_BANDS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)
"""Inclusive upper bounds of the lines of a distribution of pass rates; the last one is 1."""


def report_difficulty(run: Run) -> Report:
    rates = prompt_pass_rates(run)
    numbers = Counter(bisect_left(_BANDS, rate) for rate in rates["pass_rate"].to_pylist())
    labels = ["0", *(f"to {bound:g}" for bound in (*_BANDS[1:], 1.0))]
    rows = [{"pass rate": label, "prompts": numbers[place]} for place, label in enumerate(labels)]
    title = f"{run.layout.name}: {len(rates)} prompts by the pass rate of their completions"
    return Report({"run": run.layout.name, "prompts": rates.to_pylist()}, [Table(rows, title)])
