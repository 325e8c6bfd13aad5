"""Audits a run from its directory alone: reads everything once, changes nothing.

A run that goes on, or that crashed, can be audited as well. What follows ledger rows (checkpoints,
weights) is listed before the ledger is read, and what precedes them (trajectories) is read after
it, so that each row finds what it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from areal_flow import __version__
from areal_flow.audit import files, rows
from areal_flow.audit.database import (
    CHECKPOINTS,
    FILES,
    FORKS,
    PUBLISHED,
    RECIPE,
    AuditDatabase,
)
from areal_flow.audit.findings import ADVICE, AuditFindings, Finding, Report
from areal_flow.config import Recipe, load_recipe
from areal_flow.errors import ArealFlowError
from areal_flow.layout import RunLayout
from areal_flow.prompts.table import PromptTable
from areal_flow.store.dataset import (
    COMMIT_ORDER,
    evaluations_that_count,
    open_dataset,
    read_errors,
    trajectories_that_count,
)
from areal_flow.store.ledger import STEPS, LedgerReader
from schemas import EvaluationRow, StepRow, TrajectoryRow

KINDS = (
    "steps",
    "prompts",
    "trajectories",
    "checkpoints",
    "published weights",
    "evaluation answers",
)


def check_run(layout: RunLayout) -> Report:
    """Return what is wrong with a run; raises nothing for it."""
    found, checked = AuditFindings(), Counter(dict.fromkeys(KINDS, 0))
    if not layout.config.is_file():
        advice = "restore it from a copy: nothing was checked without it"
        found.add(files.unreadable(layout.config, "no such file", advice))
    elif files.not_prepared(layout):
        found.add(_NOT_PREPARED)
    else:
        try:
            with closing(AuditDatabase()) as database:
                _Audit(layout, database, found, checked).read()
        except duckdb.Error as error:  # values that satisfy the schema, and no arithmetic
            damaged = files.unreadable(layout.steps, error, ADVICE["both"])
            found.add(damaged._replace(expected="numbers that can be counted again"))
    return Report(layout.name, dict(checked), found.all())


@dataclass(frozen=True, slots=True)
class _Audit:
    """One reading of a run: what was found, and how much of each kind was looked at."""

    layout: RunLayout
    database: AuditDatabase
    found: AuditFindings
    checked: Counter[str]

    def read(self) -> None:
        """Read everything once, in the order that the module explains."""
        recipe = self._recipe()
        checkpoints = files.listed_checkpoints(self.layout)
        published = files.listed_weights(self.layout)
        self.database.add_table("files", _steps_of(checkpoints, published), FILES)
        has_ledger = self._ledger()
        self.database.add_table("forks", self._kept(files.read_forks(self.layout)), FORKS)
        has_log = self._log(recipe)
        self._judge("trajectories")
        if has_ledger:
            self._judge("ledger")
        if has_ledger and has_log:
            self.database.recount(num_rows=open_dataset(self.layout.trajectories).count_rows())
            self._judge("log")
        self._files(checkpoints, published)
        self._evaluations()
        self.found.extend(files.broken_descriptions(self.layout))
        self.found.extend(files.leftovers(self.layout))

    def _judge(self, rules: str) -> None:
        for finding, num_more in self.database.broken(rules):
            self.found.add(finding, num_more=num_more)

    def _kept(self, values: Iterable[dict[str, Any] | Finding | None]) -> Iterator[dict[str, Any]]:
        """Yield what could be read, and add what could not to the findings."""
        for value in values:
            if isinstance(value, Finding):
                self.found.add(value)
            elif value is not None:
                yield value

    def _recipe(self) -> Recipe | None:
        recipe = None
        try:
            recipe = load_recipe(self.layout.config)
        except (ArealFlowError, OSError) as error:
            self.found.add(files.unreadable(self.layout.config, error))
        self.database.add_table("recipe", [_recipe_row(recipe)] if recipe else [], RECIPE)
        return recipe

    def _ledger(self) -> bool:
        """Read the ledger; return whether rules can be asked of it."""
        table = None
        try:
            with read_errors(self.layout.steps):
                stored = LedgerReader(self.layout.steps, self.layout.writers).table()
        except ArealFlowError as error:
            self.found.add(files.unreadable(self.layout.steps, error))
        else:
            self.checked["steps"] = len(stored)
            where = self.layout.steps.name
            self.found.extend(rows.check_schema(stored, StepRow, where=where, kind="ledger"))
            table = rows.conform(stored, StepRow)
        self.database.add_ledger(STEPS.empty_table() if table is None else table)
        return table is not None

    def _log(self, recipe: Recipe | None) -> bool:
        """Judge every trajectory alone; return whether all of them could be read."""
        prompts = self._prompts(recipe)
        visible = trajectories_that_count(self.layout.writers)
        read = [
            self._piece(piece, recipe, prompts)
            for piece in rows.scan(self.layout.trajectories, visible)
        ]
        if not all(read):
            self.found.add(_NOT_JUDGED)
        return all(read)

    def _prompts(self, recipe: Recipe | None) -> PromptTable | None:
        if recipe is None:
            return None
        prompts = files.read_prompts(self.layout, seed=recipe.seed)
        if isinstance(prompts, Finding):
            self.found.add(prompts)
            return None
        self.checked["prompts"] = len(prompts)
        return prompts

    def _piece(self, piece: rows.Piece, recipe: Recipe | None, prompts: PromptTable | None) -> bool:
        if piece.rows is None:
            self.found.add(
                Finding("unreadable", piece.source, "readable rows", piece.error, ADVICE["file"])
            )
            return False
        self.checked["trajectories"] += len(piece.rows)
        plain = piece.rows.drop_columns([COMMIT_ORDER])
        self.found.extend(rows.check_schema(plain, TrajectoryRow, where=piece.source, kind="log"))
        table = rows.conform(plain, TrajectoryRow)
        if table is None:
            return False
        self.database.add_trajectories(table.append_column(COMMIT_ORDER, piece.rows[COMMIT_ORDER]))
        self.found.extend(rows.check_contents(table))
        if recipe is not None:
            self.found.extend(rows.check_seeds(table, run_seed=recipe.seed))
        if prompts is not None:
            expected = prompts.rows_at(table["submission_index"].to_pylist())
            self.found.extend(rows.check_prompts(table, expected))
        return True

    def _files(self, checkpoints: Sequence[Path], published: Sequence[Path]) -> None:
        """Judge checkpoints and published weights; hashing them takes the longest."""
        found = [files.read_checkpoint(self.layout, path) for path in checkpoints]
        self.checked["checkpoints"] = sum(checkpoint is not None for checkpoint in found)
        self.database.add_table("checkpoints", self._kept(found), CHECKPOINTS)
        found = [files.read_weights(self.layout, path) for path in published]
        self.checked["published weights"] = sum(version is not None for version in found)
        self.database.add_table("published", self._kept(found), PUBLISHED)
        self._judge("files")

    def _evaluations(self) -> None:
        path = self.layout.evaluations
        visible = evaluations_that_count(self.layout.writers)
        for piece in rows.scan(path, visible) if path.exists() else ():
            if piece.rows is None:
                self.found.add(files.unreadable(path, piece.error))
                continue
            self.checked["evaluation answers"] += len(piece.rows)
            plain = piece.rows.drop_columns([COMMIT_ORDER])
            self.found.extend(
                rows.check_schema(plain, EvaluationRow, where=piece.source, kind="evaluations")
            )


def _steps_of(checkpoints: Sequence[Path], published: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for kind, paths in (("checkpoint", checkpoints), ("weights", published)):
        yield from ({"kind": kind, "step": int(path.name)} for path in paths)


def _recipe_row(recipe: Recipe) -> dict[str, Any]:
    return {
        "config_hash": recipe.digest(),
        "code_version": f"areal-flow {__version__}",
        "group_size": recipe.controller.group_size,
        "groups_per_step": recipe.groups_per_step,
        "max_staleness": recipe.controller.max_staleness,
    }


_NOT_PREPARED = Finding(
    "not-prepared",
    "steps.lance",
    "a prepared run",
    "no ledger and no policy yet",
    "wait, or remove it if nobody is on it: there is nothing to resume",
    "note",
)

_NOT_JUDGED = Finding(
    "not-judged",
    "trajectories.lance",
    "every trajectory",
    "some cannot be read: ledger and trajectories were not compared",
    "mend what cannot be read, then check again",
    "note",
)
