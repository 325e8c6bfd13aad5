"""Rules of trajectory rows, some rows at a time: all that follows from a submission index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from areal_flow.audit.findings import LOG_CHANGED, Finding
from areal_flow.audit.log import Log
from areal_flow.controller.seeds import member_seed
from areal_flow.types import group_id, trajectory_id
from schemas import content_hash_mismatches

_PROMPT_COLUMNS = ("prompt_id", "difficulty", "prompt_tokens")


def check_identities(table: pa.Table) -> Iterator[Finding]:
    """Yield rows whose ids are not those of their submission index, member and branch."""
    names = ["trajectory_id", "group_id", "submission_index", "member", "branch"]
    for identifier, group, index, member, branch in _tuples(table, names):
        if identifier != (expected := trajectory_id(index, member, branch)):
            yield _finding("trajectory-id", identifier, expected, identifier)
        if group != group_id(index):
            yield _finding("group-id", identifier, group_id(index), group)


def check_seeds(table: pa.Table, *, run_seed: int, group_size: int) -> Iterator[Finding]:
    """Yield rows whose seed does not follow from run, submission and member."""
    names = ["trajectory_id", "submission_index", "member", "seed"]
    for identifier, index, member, seed in _tuples(table, names):
        if member >= group_size:
            expected = f"a member below group_size {group_size}"
            yield _finding("group-size", identifier, expected, str(member))
        expected_seed = member_seed(run_seed, index, member)
        if seed != expected_seed:
            yield _finding("seed", identifier, str(expected_seed), str(seed))


def check_prompts(table: pa.Table, prompts: pa.Table) -> Iterator[Finding]:
    """Yield rows whose prompt is not that of their submission.

    Args:
        prompts: the prompt table's rows for the same submissions, in the same order.
    """
    for name in _PROMPT_COLUMNS:
        found = table[name].combine_chunks()
        expected = prompts[name].combine_chunks().cast(found.type)
        if found.equals(expected):
            continue
        for row, identifier in enumerate(table["trajectory_id"].to_pylist()):
            if not found.slice(row, 1).equals(expected.slice(row, 1)):
                wanted = f"{name} of the prompt table at its submission"
                yield _finding("prompt", identifier, wanted, "another")


def check_contents(table: pa.Table) -> Iterator[Finding]:
    """Yield rows that are not what was written."""
    for identifier, expected, found in content_hash_mismatches(table):
        yield _finding("content-hash", identifier, expected, found)


def check_versions(log: Log) -> Iterator[Finding]:
    """Yield trajectories whose tokens were sampled by ever older versions."""
    for row, identifier in enumerate(log.ids):
        versions = [version for version, _ in log.spans(row)]
        if versions != sorted(versions):
            ascending, found = "versions that never decrease", str(versions)
            yield _finding("versions-decrease", identifier, ascending, found)


def _tuples(table: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def _finding(rule: str, identifier: str, expected: str, found: str) -> Finding:
    return Finding(rule, identifier, expected, found, LOG_CHANGED)
