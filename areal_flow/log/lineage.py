"""The lineage of a policy version: everything it was trained from.

A policy version is the number of the step that produced it. Its lineage is the ledger's rows 1 to
that step, with their trajectories, prompts and verifiers, the versions that sampled the trained
tokens, and the chain of weights hashes from the genesis. Each part is a view in `sql/lineage.sql`,
computed on first use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from areal_flow.core.errors import ArealFlowError
from areal_flow.log.database import TableFormat, convert_relation, read_sql
from areal_flow.log.dataset import read_errors
from areal_flow.log.directory import find_parent, read_parent
from areal_flow.policy.checkpoints import (
    checkpoint_path,
    is_recorded,
    list_checkpoints,
    read_checkpoint_state,
    read_forks,
)

if TYPE_CHECKING:
    from areal_flow.log.queries import Run


_USED = (
    *("trajectory_id", "step", "policy_version", "submission_index", "member", "branch", "attempt"),
    *("seed", "writer_epoch", "prompt_id", "difficulty", "reward", "verdict", "verifier"),
    *("finish_reason", "generator", "version_spans", "num_tokens", "num_trained_tokens"),
    *("num_masked_tokens", "staleness"),
)


@dataclass(frozen=True, slots=True)
class HashCheck:
    """A weights hash that was recorded elsewhere, and the ledger's."""

    what: str
    actual: str
    expected: str

    @property
    def holds(self) -> bool:
        return self.actual == self.expected


@dataclass(frozen=True)
class Lineage:
    """The lineage of one policy version; each part is read on first use."""

    run: Run
    version: int

    @cached_property
    def steps(self) -> Any:
        """The ledger's rows 0 (the genesis) to the version, without ids, as pandas."""
        return self._read("FROM ledger_rows")

    def trajectories(
        self, format: TableFormat = "pandas", *, columns: Sequence[str] | None = None
    ) -> Any:
        """Return the trained trajectories, one row each, by step, without tokens."""
        return self._read(f"SELECT {', '.join(columns or _USED)} FROM used", format)

    @cached_property
    def prompts(self) -> Any:
        """Each prompt with its steps, number of trajectories and rewards, as pandas."""
        return self._read("FROM used_prompts")

    @cached_property
    def verifiers(self) -> Any:
        """Each verifier, by name and hash of its code, with what it scored, as pandas."""
        return self._read("FROM verifiers")

    @cached_property
    def policy_versions(self) -> Any:
        """Trained and masked tokens by the policy version that sampled them, as pandas."""
        return self._read("FROM policy_versions")

    @cached_property
    def weights_hashes(self) -> Any:
        """The chain from the genesis, as pandas; `follows`: the parent is the row before."""
        return self._read("FROM weights_hashes")

    @cached_property
    def forks(self) -> list[dict[str, Any]]:
        """Replays of steps up to the version that gave different weights."""
        forks = read_forks(self.run.layout.forks)
        return [fork for fork in forks if fork["step"] <= self.version]

    @cached_property
    def forked_from(self) -> list[dict[str, Any]]:
        """The step of the parent run that is this genesis, then that run's parent, and so on.

        `ledger` has the chain of that run's ledger from its genesis to the step; None if the run is
        gone or cannot be read.
        """
        layout = self.run.layout
        parent = read_parent(layout)
        if parent is None:
            return []
        row = {**asdict(parent), "ledger": None}
        if (parent_layout := find_parent(layout, parent)) is None:
            return [row]
        try:
            with read_errors(parent_layout.steps):
                lineage = type(self.run)(parent_layout.root).lineage(parent.step)
                ledger = {**lineage.chain, "weights_hash": lineage._expected(parent.weights_hash)}
            return [{**row, "ledger": ledger}, *lineage.forked_from]
        except ArealFlowError:
            return [row]

    @property
    def chain(self) -> dict[str, Any]:
        """The run, the weights hashes at both ends, and the steps before which the chain breaks."""
        hashes = self._records("FROM weights_hashes")
        return {
            "run": self.run.layout.name,
            "genesis_hash": hashes[0]["weights_hash"],
            "weights_hash": hashes[-1]["weights_hash"],
            "chain_breaks": [row["step"] for row in hashes if not row["follows"]],
        }

    @property
    def chat_template_hash(self) -> str | None:
        """SHA-256 of the chat template that rendered the prompts; None without one."""
        path = self.run.layout.chat_template
        return json.loads(path.read_text())["sha256"] if path.is_file() else None

    def hash_checks(self, recorded: Mapping[str, str]) -> tuple[HashCheck, ...]:
        """Compare the given hashes, and those of checkpoint and parent run, with the ledger's."""
        hashes = dict(recorded)
        checkpoints = self.run.layout.checkpoints
        if self.version in list_checkpoints(checkpoints):
            state = read_checkpoint_state(checkpoint_path(checkpoints, self.version))
            hashes["the checkpoint"] = state.weights_hash
        chain = self.chain
        checks = [HashCheck(what, value, self._expected(value)) for what, value in hashes.items()]
        for parent in self.forked_from[:1]:
            what = f"step {parent['step']} of run {parent['name']}, which is the genesis,"
            recorded_hash = (parent["ledger"] or parent)["weights_hash"]
            checks.append(HashCheck(what, recorded_hash, chain["genesis_hash"]))
        return tuple(checks)

    def _expected(self, weights_hash: str) -> str:
        """Return the ledger's hash of the version, or the given one if a replay led to it."""
        row = self._records("FROM weights_hashes")[-1]
        forked = is_recorded(self.version, weights_hash, row, self.run.layout.forks)
        return weights_hash if forked else row["weights_hash"]

    def summary(self) -> dict[str, Any]:
        """Return the lineage in numbers and hashes, ready for JSON."""
        steps = self._records("FROM ledger_rows")
        verifiers = self._records("FROM verifiers")
        environments = self._spans("numeric_environment")
        for span in environments:
            span["numeric_environment"] = json.loads(span["numeric_environment"])
        return {
            **self.chain,
            "forked_from": self.forked_from,
            "version": self.version,
            "num_steps": len(steps) - 1,
            "num_trajectories": sum(row["num_trajectories"] for row in verifiers),
            "num_prompts": len(self.prompts),
            "num_trained_tokens": sum(step["num_trained_tokens"] for step in steps),
            "num_masked_tokens": sum(step["num_masked_tokens"] for step in steps),
            "trajectory_watermark": steps[-1]["trajectory_watermark"],
            "forks": self.forks,
            "chat_template": self.chat_template_hash,
            "verifiers": verifiers,
            "policy_versions": self._records("FROM policy_versions"),
            "config_hashes": self._spans("config_hash"),
            "code_versions": self._spans("code_version"),
            "writer_epochs": self._spans("writer_epoch"),
            "numeric_environments": environments,
        }

    def last_steps(self, num_steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return weights hashes of the last versions, and the last steps' tokens by version."""
        hashes = self._records("FROM weights_hashes")[-num_steps - 1 :]
        return hashes, self._records(f"FROM sampled WHERE step > {self.version - num_steps}")

    def _spans(self, column: str) -> list[dict[str, Any]]:
        """Return each value of a ledger column with the first and the last step that has it."""
        return self._records(
            f"SELECT {column}, min(step) AS first_step, max(step) AS last_step FROM steps "
            f"GROUP BY {column} ORDER BY first_step"
        )

    def _records(self, query: str) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self._read(query, "arrow").to_pylist()
        return records

    def _read(self, query: str, format: TableFormat = "pandas") -> Any:
        return convert_relation(self._database.sql(query), format)

    @cached_property
    def _database(self) -> Any:
        database = self.run.database(at=self.version)
        database.execute(read_sql("lineage"))
        return database
