"""Everything that a policy version was made from.

A policy version is the step that made it: its lineage is the ledger's rows 1 to that step, and by
them trajectories, prompts, verifiers, the versions that sampled each trained token, and the chain
of weights hashes from the genesis. Read when asked for, in columns: no token becomes an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from areal_flow.recovery.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    read_checkpoint_state,
)

if TYPE_CHECKING:
    from areal_flow.store.queries import Run, TableFormat

_TRAJECTORY_COLUMNS = """
    trajectory_id, step, policy_version, submission_index, member, branch, attempt, seed,
    writer_epoch, prompt_id, difficulty, reward, verdict, verifier, finish_reason, generator,
    version_spans, num_tokens, num_trained_tokens, num_masked_tokens, staleness
"""

_PROMPTS = """
SELECT prompt_id, any_value(difficulty) AS difficulty, count(*) AS num_trajectories,
       avg(reward) AS reward_mean, min(step) AS first_step, max(step) AS last_step
FROM trajectories WHERE {used} GROUP BY prompt_id ORDER BY prompt_id
"""

_VERIFIERS = """
SELECT verifier, count(*) AS num_trajectories, min(step) AS first_step, max(step) AS last_step
FROM trajectories WHERE {used} GROUP BY verifier ORDER BY first_step, verifier
"""

_POLICY_VERSIONS = """
WITH spans AS (
    SELECT unnest(chosen_spans(version_spans, loss_mask)) AS span, policy_version
    FROM trajectories WHERE {used}
),
counted AS (
    SELECT span.version, span.length, num_trained(span, policy_version, {max_staleness}) AS trained
    FROM spans
)
SELECT version, sum(trained)::BIGINT AS num_trained_tokens,
       sum(length - trained)::BIGINT AS num_masked_tokens
FROM counted WHERE length > 0 GROUP BY version ORDER BY version
"""

_WEIGHTS_COLUMNS = ("step", "parent_hash", "weights_hash", "served_hash")
_STEP_COLUMNS = (
    *_WEIGHTS_COLUMNS,
    "policy_version",
    "writer_epoch",
    "num_trained_tokens",
    "num_masked_tokens",
    "reward_mean",
    "loss",
    "trajectory_watermark",
    "lance_version",
    "config_hash",
    "code_version",
    "numeric_environment",
    "committed_at",
)


@dataclass(frozen=True, slots=True)
class HashCheck:
    """A weights hash that was recorded elsewhere, and the ledger's."""

    what: str
    found: str
    expected: str

    @property
    def holds(self) -> bool:
        return self.found == self.expected


@dataclass(frozen=True)
class Lineage:
    """What one policy version was made from; each part is read on first use."""

    run: Run
    version: int

    @cached_property
    def steps(self) -> Any:
        """The ledger's rows 0 (the genesis) to the version, without ids: pandas."""
        steps = self.run.steps(columns=_STEP_COLUMNS, where=f"step <= {self.version}")
        return steps.sort_values("step", ignore_index=True)

    def trajectories(
        self, format: TableFormat = "pandas", *, columns: Sequence[str] | None = None
    ) -> Any:
        """Return the trajectories that were trained, one row each, by step; tokens left out.

        Args:
            format: as in `Run.trajectories`; "duckdb" is a lazy relation.
            columns: any of `Run.database`'s view, instead of the usual ones.
        """
        names = ", ".join(columns) if columns is not None else _TRAJECTORY_COLUMNS
        return self._query(
            f"SELECT {names} FROM trajectories WHERE {self._used} ORDER BY step, trajectory_id",
            format,
        )

    @cached_property
    def prompts(self) -> Any:
        """Each prompt with how often, how well and in which steps it was trained: pandas."""
        return self._query(_PROMPTS.format(used=self._used))

    @cached_property
    def verifiers(self) -> Any:
        """Each verifier, by name and hash of its code, with what it scored: pandas."""
        return self._query(_VERIFIERS.format(used=self._used))

    @cached_property
    def policy_versions(self) -> Any:
        """How many tokens each policy version sampled that were trained, or masked: pandas."""
        query = _POLICY_VERSIONS.format(used=self._used, max_staleness=self.run.max_staleness)
        return self._query(query)

    @cached_property
    def weights_hashes(self) -> Any:
        """The chain from the genesis: pandas, `follows` where a parent is the row before it."""
        chain = self.steps[list(_WEIGHTS_COLUMNS)].copy()
        chain["follows"] = chain.parent_hash == chain.weights_hash.shift(1, fill_value="")
        return chain

    @cached_property
    def forks(self) -> list[dict[str, Any]]:
        """Replays up to the version that made other weights, in another numeric environment."""
        path = self.run.layout.forks
        lines = path.read_text().splitlines() if path.is_file() else []
        forks = [json.loads(line) for line in lines]
        return [fork for fork in forks if fork["step"] <= self.version]

    def hash_checks(self, recorded: Mapping[str, str]) -> tuple[HashCheck, ...]:
        """Compare weights hashes with the ledger's: those given, and the version's checkpoint's.

        Args:
            recorded: hashes by what carries them.
        """
        found = dict(recorded)
        checkpoints = self.run.layout.checkpoints
        if self.version in list_checkpoints(checkpoints):
            state = read_checkpoint_state(checkpoint_path(checkpoints, self.version))
            found["the checkpoint"] = state.weights_hash
        expected = self.steps.iloc[-1].weights_hash
        return tuple(HashCheck(what, value, expected) for what, value in found.items())

    def summary(self) -> dict[str, Any]:
        """Return all of it in numbers and hashes, ready for JSON."""
        steps, head = self.steps, self.steps.iloc[-1]
        chain = self.weights_hashes
        return {
            "run": self.run.layout.name,
            "version": self.version,
            "num_steps": len(steps) - 1,
            "num_trajectories": int(self.verifiers.num_trajectories.sum()),
            "num_prompts": len(self.prompts),
            "num_trained_tokens": int(steps.num_trained_tokens.sum()),
            "num_masked_tokens": int(steps.num_masked_tokens.sum()),
            "weights_hash": head.weights_hash,
            "genesis_hash": steps.iloc[0].weights_hash,
            "chain_breaks": [int(step) for step in chain[~chain.follows].step],
            "forks": self.forks,
            "trajectory_watermark": int(head.trajectory_watermark),
            "lance_version": int(head.lance_version),
            "verifiers": _records(self.verifiers),
            "policy_versions": _records(self.policy_versions),
            "config_hashes": self._spans("config_hash"),
            "code_versions": self._spans("code_version"),
            "writer_epochs": self._spans("writer_epoch"),
            "numeric_environments": [
                {**span, "numeric_environment": json.loads(span["numeric_environment"])}
                for span in self._spans("numeric_environment")
            ],
        }

    def _spans(self, column: str) -> list[dict[str, Any]]:
        """Return each value of a ledger column with the first and the last step that has it."""
        found = self.steps.groupby(column, sort=False).step.agg(["min", "max"])
        return [
            {column: value, "first_step": int(first), "last_step": int(last)}
            for value, first, last in found.itertuples()
        ]

    @property
    def _used(self) -> str:
        return f"status = 'trained' AND step <= {self.version}"

    def _query(self, query: str, format: TableFormat = "pandas") -> Any:
        from areal_flow.store.queries import convert

        relation = self._database.sql(query)
        return relation if format == "duckdb" else convert(relation.to_arrow_table(), format)

    @cached_property
    def _database(self) -> Any:
        return self.run.database(at=self.version)


def _records(frame: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = pa.Table.from_pandas(frame, preserve_index=False).to_pylist()
    return records
