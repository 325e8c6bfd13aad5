"""What a policy version was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from areal_flow.store.lineage import HashCheck, Lineage
from pipelines.cli.tables import Report, Table, facts
from pipelines.models import Traced

_BARS = 30
_LAST_STEPS = 5
_MOST_ROWS = 12

_STEP_COLUMNS = {
    "step": "{step}",
    "from": "v{policy_version}",
    "reward": "{reward_mean:.3f}",
    "trained": "{num_trained_tokens:,}",
    "masked": "{num_masked_tokens:,}",
    "loss": "{loss:.4f}",
    "weights": "{weights_hash:.12}",
    "parent": "{parent_hash:.12}",
    "committed": "{committed_at:%Y-%m-%d %H:%M:%S}",
}
_VERSION_COLUMNS = {
    "version": "{versions}",
    "trained": "{num_trained_tokens:,}",
    "masked": "{num_masked_tokens:,}",
    "": "{bar}",
}


def report_lineage(traced: Traced) -> Report:
    """Report a lineage: numbers, the last steps, who sampled the tokens, and what holds.

    The exit code is 1 if a weights hash is not the ledger's.
    """
    found, version = traced.lineage.summary(), traced.registered
    named = version and {"name": version.name, "version": version.version, "tags": version.tags}
    checks = [{**asdict(check), "holds": check.holds} for check in traced.checks]
    parts: list[RenderableType] = [facts(_facts({**found, "registered": named}))]
    if found["version"] > 0:
        parts += [_steps(traced.lineage), _policy_versions(found["policy_versions"])]
    parts += ["", *(_said(check) for check in traced.checks)]
    code = int(not all(check.holds for check in traced.checks))
    return Report({"registered": named, **found, "checks": checks}, parts, code)


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    named, breaks = found["registered"], found["chain_breaks"]
    broken = f"broken before step {', '.join(map(str, breaks))}" if breaks else "unbroken"
    forks = ", ".join(str(fork["step"]) for fork in found["forks"])
    forked = f"replayed to other weights, in another numeric environment: steps {forks}"
    environments = [
        {**record, "text": ", ".join(f"{k} {v}" for k, v in record["numeric_environment"].items())}
        for record in found["numeric_environments"]
    ]
    return [
        *([("registered", f"models:/{named['name']}/{named['version']}")] if named else []),
        ("policy", f"version {found['version']} of run {found['run']}"),
        ("weights", found["weights_hash"]),
        ("chain", f"from the genesis {found['genesis_hash']}, {broken}"),
        ("steps", str(found["num_steps"])),
        ("trajectories", f"{found['num_trajectories']:,}, of {found['num_prompts']:,} prompts"),
        (
            "tokens",
            f"{found['num_trained_tokens']:,} trained, {found['num_masked_tokens']:,} masked",
        ),
        (
            "dataset",
            f"{found['trajectory_watermark']:,} trajectories in the log, Lance version "
            f"{found['lance_version']}",
        ),
        ("verifier", _spans(found["verifiers"], "verifier") or "none"),
        ("config", _spans(found["config_hashes"], "config_hash")),
        ("code", _spans(found["code_versions"], "code_version")),
        ("writer epoch", _spans(found["writer_epochs"], "writer_epoch")),
        ("environment", _spans(environments, "text")),
        ("forks", forked if forks else "none"),
    ]


def _spans(records: Sequence[dict[str, Any]], name: str) -> str:
    """Return values with their steps; the only one needs none."""
    if len(records) == 1:
        return str(records[0][name])
    return "\n".join(f"{r[name]} (steps {r['first_step']} to {r['last_step']})" for r in records)


def _steps(lineage: Lineage) -> Table:
    steps = lineage.steps.iloc[1:]
    title = "its steps"
    if len(steps) > _LAST_STEPS:
        title = f"the last {_LAST_STEPS} of {len(steps)} steps"
    return Table(_STEP_COLUMNS, steps.tail(_LAST_STEPS).to_dict("records"), title)


def _policy_versions(records: Sequence[dict[str, Any]]) -> Table:
    rows = bucketed(records)
    most = max([1, *(row["num_trained_tokens"] for row in rows)])
    bars = [{**row, "bar": "█" * round(_BARS * row["num_trained_tokens"] / most)} for row in rows]
    return Table(_VERSION_COLUMNS, bars, "its tokens by the policy version that sampled them")


def bucketed(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum versions with their neighbours until a screen holds them; label each with its range."""
    if not records:
        return []
    frame = pd.DataFrame(records)
    parts = frame.groupby(frame.index // -(-len(frame) // _MOST_ROWS))
    found = parts[["num_trained_tokens", "num_masked_tokens"]].sum()
    ends = zip(parts.version.first(), parts.version.last(), strict=True)
    found["versions"] = [str(a) if a == b else f"{a} to {b}" for a, b in ends]
    return list(found.to_dict("records"))


def _said(check: HashCheck) -> Text:
    if check.holds:
        return Text(f"✓ {check.what} has the weights hash of the ledger", "green")
    said = f"✗ {check.what} has weights {check.found}, the ledger {check.expected}"
    return Text(said, "bold red")
