"""Findings of an audit, what to do about them, and the report that they add up to.

An error is damage or a bug. A note is what a crash leaves behind and nobody reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "note"]

MAX_PER_RULE = 20
"""Findings of one rule that are kept; more are only counted."""

ADVICE = {
    "ledger": "steps.lance was changed after it was written: restore it from a copy",
    "log": "trajectories.lance was changed after it was written: restore it from a copy",
    "both": "trajectories.lance or steps.lance was changed after it was written: restore both from "
    "a copy; if nobody touched them this is a bug, please report it",
    "evaluations": "evaluations.lance was changed after it was written: restore it from a copy",
    "prompts": "joins by prompt_id are unreliable in this run; give rows unique ids before the "
    "next run",
    "recipe": "config.toml was changed: put its old settings back, a run keeps its recipe",
    "verifier": "inputs.json or a log was changed, or the verifier while the run went on: compare "
    "nothing across it",
    "parent": "run.json, the ledger or that of the parent was changed: restore them from a copy",
    "orphan": "nothing, if the parent was removed or is kept elsewhere; the run needs it no more",
    "checkpoint": "remove it: --resume goes on from an older one; checkpoint 0, which has none, "
    "restore from a copy",
    "description": "copy these files from model/ into it: its weights are as they were",
    "closed": "make it readable, then check again: nobody knows whether it is damaged",
    "disagree": "one of the two was changed: restore it from a copy, and remove neither before",
    "weights": "remove it: --resume publishes the newest version again",
    "file": "restore it from a copy",
    "harmless": "nothing: nobody reads it",
    "unprepared": "wait, or remove it if nobody is on it: there is nothing to resume",
    "before": "nothing: --resume goes on from there",
    "overtaken": "check again when the run commits less often, or has ended",
    "unjudged": "fix what cannot be read, then check again",
}
"""What to do, by what is damaged."""


class Finding(NamedTuple):
    rule: str
    where: str
    expected: str
    actual: str
    advice: str
    severity: Severity = "error"


def unreadable(where: str, error: object, advice: str = ADVICE["file"]) -> Finding:
    cause = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Finding("unreadable", where, "something readable", cause, advice)


class Report:
    """What was looked at, by kind, and the findings: of each rule the first, the rest a count."""

    def __init__(self, run: str, kinds: Iterable[str] = ()) -> None:
        self.run = run
        self.checked = Counter(dict.fromkeys(kinds, 0))
        self._kept: defaultdict[str, list[Finding]] = defaultdict(list)
        self._num_more: Counter[str] = Counter()

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            if len(self._kept[finding.rule]) < MAX_PER_RULE:
                self._kept[finding.rule].append(finding)
            else:
                self._num_more[finding.rule] += 1

    @property
    def findings(self) -> tuple[Finding, ...]:
        findings: list[Finding] = []
        for rule, kept in self._kept.items():
            findings += kept
            if num_more := self._num_more[rule]:
                where = f"{num_more} more places"
                last = kept[-1]._replace(where=where, expected="as above", actual="as above")
                findings.append(last)
        return tuple(findings)

    @property
    def clean(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        counted = [f"{n} {kind}{'s' * (n != 1)}" for kind, n in sorted(counts.items())]
        return ", ".join(["clean" if self.clean else "not clean", *counted])

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "clean": self.clean,
            "checked": self.checked,
            "findings": [finding._asdict() for finding in self.findings],
        }
