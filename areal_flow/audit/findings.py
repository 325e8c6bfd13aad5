"""What an audit says: findings, and the report they add up to.

An error is damage or a bug. A note is what a crash leaves behind and nobody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "note"]

MAX_PER_RULE = 20
"""AuditFindings of one rule that are kept; more are only counted."""

LEDGER_CHANGED = "steps.lance was changed after it was written: restore it from a copy"
LOG_CHANGED = "trajectories.lance was changed after it was written: restore it from a copy"
LOG_OR_LEDGER_CHANGED = (
    "trajectories.lance or steps.lance was changed after it was written: restore both from a copy; "
    "if nobody touched them this is a bug, please report it"
)


class Finding(NamedTuple):
    """A rule that does not hold at a place."""

    rule: str
    where: str
    expected: str
    found: str
    advice: str
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Report:
    """What was looked at, by kind, and what was found."""

    run: str
    checked: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether there is no error; notes do not count."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """What was found, in words."""
        counts = Counter(finding.severity for finding in self.findings)
        said = [f"{n} {kind}{'s' * (n != 1)}" for kind, n in sorted(counts.items())]
        return ", ".join(["clean" if self.clean else "not clean", *said])

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "run": self.run,
            "clean": self.clean,
            "checked": self.checked,
            "findings": [finding._asdict() for finding in self.findings],
        }


class AuditFindings:
    """Collects findings in bounded memory: the first `MAX_PER_RULE` of a rule, the rest a count."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._counts: Counter[str] = Counter()

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self._counts[finding.rule] += 1
            if self._counts[finding.rule] <= MAX_PER_RULE:
                self._kept.append(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.add(finding)

    def all(self) -> tuple[Finding, ...]:
        """Return what is kept; a rule that has more ends with a finding that counts them."""
        last = {finding.rule: finding for finding in self._kept}
        more = [
            last[rule]._replace(where=f"{count - MAX_PER_RULE} more places")
            for rule, count in self._counts.items()
            if count > MAX_PER_RULE
        ]
        return (*self._kept, *(m._replace(expected="as above", found="as above") for m in more))
