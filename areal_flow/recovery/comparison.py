"""A step as the ledger has it and as it was computed again in: what differs, and may it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from areal_flow.types import PolicyHashes, StepMetrics, StepResult

COMPARED_METRICS = ("loss", "grad_norm", "num_trained_tokens", "num_masked_tokens")
"""What a replay must find again besides all that the algorithm computed."""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step, recorded and replayed. After a fork it started from other weights."""

    recorded: StepResult
    replayed: StepResult
    after_fork: bool = False

    @property
    def step(self) -> int:
        return self.recorded.step

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Return what is recorded and what was replayed, by name, where they are not equal."""
        return _differences(compared_values(self.recorded), compared_values(self.replayed))

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def forked(self) -> bool:
        """Return whether the replay made another policy than the one that is recorded."""
        return self.recorded.hashes != self.replayed.hashes

    @property
    def refused(self) -> bool:
        """Return whether the step differs where it must not."""
        return (
            not self.equal
            and not self.after_fork
            and bits_must_agree(
                self.recorded.numeric_environment, self.replayed.numeric_environment
            )
        )

    @property
    def environment_differences(self) -> dict[str, tuple[Any, Any]]:
        """Return what was there and what is here of the numeric environment, where it differs."""
        return _differences(
            json.loads(self.recorded.numeric_environment),
            json.loads(self.replayed.numeric_environment),
        )


def bits_must_agree(recorded_environment: str, replayed_environment: str) -> bool:
    """Return whether two numeric environments (JSON) must give the same bits: one CPU's do."""
    recorded, replayed = json.loads(recorded_environment), json.loads(replayed_environment)
    return bool(recorded == replayed and replayed["device"] == "cpu")


def compared_values(result: StepResult) -> dict[str, Any]:
    """Return, by name, what a replay must find again."""
    metrics = {name: getattr(result.metrics, name) for name in COMPARED_METRICS}
    return {**metrics, **result.metrics.metrics, **asdict(result.hashes)}


def result_from_row(row: Mapping[str, Any]) -> StepResult:
    """Return the result that a ledger row recorded."""
    metrics = {field.name: row[field.name] for field in fields(StepMetrics)}
    metrics["masked_fraction_by_tenth"] = tuple(metrics["masked_fraction_by_tenth"])
    hashes = {field.name: row[field.name] for field in fields(PolicyHashes)}
    return StepResult(
        row["step"], PolicyHashes(**hashes), StepMetrics(**metrics), row["numeric_environment"]
    )


def _differences(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    return {
        name: (recorded.get(name), replayed.get(name))
        for name in {**recorded, **replayed}
        if recorded.get(name) != replayed.get(name)
    }
