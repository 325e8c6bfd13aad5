"""A run directory in, a report out: `areal-flow check`. Reads everything, changes nothing.

Also of a run that goes on, or that crashed: what follows ledger rows (checkpoints, weights) is
listed before the ledger is read, and what precedes them (trajectories) is read after it, so that
each row finds what it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow import __version__
from areal_flow.audit import accounting, consumption, ledger, trajectories, weights
from areal_flow.audit.findings import LEDGER_CHANGED, LOG_CHANGED, Finding, Findings, Report
from areal_flow.audit.log import Log, join_logs, log_of, repeated_ids
from areal_flow.audit.tables import check_schema, conform
from areal_flow.config import Recipe, load_recipe
from areal_flow.errors import ArealFlowError, RunError
from areal_flow.layout import RunLayout
from areal_flow.prompts.table import PromptTable
from areal_flow.store.dataset import COMMIT_ORDER, open_dataset, read_errors
from areal_flow.store.queries import Run
from areal_flow.store.scans import Piece, scan
from areal_flow.store.visibility import evaluations_that_count
from pipelines import stored
from schemas import EvaluationRow, StepRow, TrajectoryRow

BYTES_AT_ONCE = 16 * 2**20
"""Rows that are judged together: judging costs the same for one row and for many."""

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
    audit = _Audit(layout)
    audit.read()
    return Report(layout.name, dict(audit.checked), audit.found.all())


@dataclass(slots=True)
class _Audit:
    """One reading of a run: what was found, and how much of each kind was looked at."""

    layout: RunLayout
    found: Findings = field(default_factory=Findings)
    checked: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))

    def read(self) -> None:
        """Read everything once, in the order that the module explains."""
        try:
            run = Run(self.layout.root)
        except RunError:
            advice = "restore it from a copy: nothing was checked without it"
            self.found.add(stored.unreadable(self.layout.config, "no such file", advice))
            return
        if stored.not_prepared(self.layout):
            self.found.add(_not_prepared())
            return
        recipe = self._recipe()
        checkpoints = stored.listed_checkpoints(self.layout)
        published = stored.listed_weights(self.layout)
        versions = [int(path.name) for path in published]
        rows = self._ledger(run)
        forks = self._forks()
        log = self._log(run, recipe)
        by_step = {row["step"]: row for row in ledger.once(rows or ())}
        if rows is not None:
            self.found.extend(_ledger_findings(rows, forks, recipe))
            self.found.extend(weights.check_steps(checkpoints, versions, rows))
        if rows is not None and log is not None:
            num_rows = open_dataset(self.layout.trajectories).count_rows()
            self.found.extend(_log_findings(list(by_step.values()), log, recipe, num_rows))
        self._checkpoints(checkpoints, by_step)
        self._weights(published, by_step, forks)
        self._evaluations()
        self.found.extend(stored.broken_descriptions(self.layout))
        self.found.extend(stored.leftovers(self.layout))

    def _recipe(self) -> Recipe | None:
        try:
            return load_recipe(self.layout.config)
        except (ArealFlowError, OSError) as error:
            self.found.add(stored.unreadable(self.layout.config, error))
            return None

    def _ledger(self, run: Run) -> list[dict[str, Any]] | None:
        try:
            with read_errors(self.layout.steps):
                table = run.steps("arrow")
        except ArealFlowError as error:
            self.found.add(stored.unreadable(self.layout.steps, error))
            return None
        self.checked["steps"] = len(table)
        where = self.layout.steps.name
        self.found.extend(check_schema(table, StepRow, where=where, advice=LEDGER_CHANGED))
        rows = conform(table, StepRow)
        return rows.sort_by("step").to_pylist() if rows is not None else None

    def _forks(self) -> list[dict[str, Any]]:
        forks = []
        for fork in stored.read_forks(self.layout):
            if isinstance(fork, Finding):
                self.found.add(fork)
            else:
                forks.append(fork)
        return forks

    def _log(self, run: Run, recipe: Recipe | None) -> Log | None:
        """Judge every trajectory; return the log without tokens, or None if a part is missing."""
        prompts = self._prompts(recipe)
        parts: list[Log] = []
        complete = True
        for piece in _merged(run.scan_trajectories()):
            part = self._part(piece, recipe, prompts)
            parts += [part] if part is not None else []
            complete = complete and part is not None
        if not complete:
            self.found.add(_not_judged())
            return None
        log = join_logs(parts)
        for identifier in repeated_ids(log):
            expected, found = "one row", "another row of the same id"
            self.found.add(Finding("trajectory-twice", identifier, expected, found, LOG_CHANGED))
        return log

    def _prompts(self, recipe: Recipe | None) -> PromptTable | None:
        if recipe is None:
            return None
        prompts = stored.read_prompts(self.layout, seed=recipe.seed)
        if isinstance(prompts, Finding):
            self.found.add(prompts)
            return None
        self.checked["prompts"] = len(prompts)
        return prompts

    def _part(self, piece: Piece, recipe: Recipe | None, prompts: PromptTable | None) -> Log | None:
        if piece.rows is None:
            self.found.add(
                Finding("unreadable", piece.source, "readable rows", piece.error, stored.RESTORE)
            )
            return None
        self.checked["trajectories"] += len(piece.rows)
        plain = piece.rows.drop_columns([COMMIT_ORDER])
        self.found.extend(
            check_schema(plain, TrajectoryRow, where=piece.source, advice=LOG_CHANGED)
        )
        rows = conform(plain, TrajectoryRow)
        if rows is None:
            return None
        part = log_of(rows.append_column(COMMIT_ORDER, piece.rows[COMMIT_ORDER]))
        self.found.extend(_row_findings(rows, part, recipe, prompts))
        return part

    def _checkpoints(self, steps: Sequence[int], rows: Mapping[int, ledger.Row]) -> None:
        for step in steps:
            checkpoint = stored.read_checkpoint(self.layout, step)
            self.checked["checkpoints"] += checkpoint is not None
            if isinstance(checkpoint, Finding):
                self.found.add(checkpoint)
            elif checkpoint is not None:
                self.found.extend(weights.check_checkpoint(checkpoint, rows))

    def _weights(
        self,
        published: Sequence[Path],
        rows: Mapping[int, ledger.Row],
        forks: Sequence[ledger.Row],
    ) -> None:
        """Compare with the ledger's rows, as far as there are any."""
        for path in published:
            version = stored.read_weights(self.layout, path)
            self.checked["published weights"] += version is not None
            if isinstance(version, Finding):
                self.found.add(version)
            elif version is not None:
                self.found.extend(weights.check_weights(version, rows, forks))

    def _evaluations(self) -> None:
        path = self.layout.evaluations
        counted = evaluations_that_count(self.layout.writers)
        for piece in _merged(scan(path, counted)) if path.exists() else ():
            if piece.rows is None:
                self.found.add(stored.unreadable(path, piece.error))
                continue
            self.checked["evaluation answers"] += len(piece.rows)
            rows = piece.rows.drop_columns([COMMIT_ORDER])
            advice = "evaluations.lance was changed after it was written: restore it from a copy"
            self.found.extend(check_schema(rows, EvaluationRow, where=piece.source, advice=advice))


def _ledger_findings(
    rows: Sequence[ledger.Row], forks: Sequence[ledger.Row], recipe: Recipe | None
) -> Iterator[Finding]:
    yield from ledger.check_ledger(rows, forks)
    yield from consumption.check_consumed_once(ledger.once(rows))
    if recipe is None:
        return
    yield from ledger.check_configuration(
        rows, config_hash=recipe.digest(), code_version=f"areal-flow {__version__}"
    )
    yield from consumption.check_batch_size(rows, groups_per_step=recipe.groups_per_step)


def _log_findings(
    rows: Sequence[ledger.Row], log: Log, recipe: Recipe | None, num_rows: int
) -> Iterator[Finding]:
    yield from consumption.check_consumed_committed(rows, log)
    yield from consumption.check_position(rows, log, num_rows=num_rows)
    yield from accounting.check_accounting(rows, log)
    yield from accounting.check_trained(rows, log)
    if recipe is None:
        return
    max_staleness = recipe.controller.max_staleness
    yield from accounting.check_staleness(rows, log, max_staleness=max_staleness)
    yield from consumption.check_discards(rows, log, max_staleness=max_staleness)


def _row_findings(
    rows: pa.Table, part: Log, recipe: Recipe | None, prompts: PromptTable | None
) -> Iterator[Finding]:
    yield from trajectories.check_identities(rows)
    yield from trajectories.check_contents(rows)
    yield from trajectories.check_versions(part)
    if recipe is not None:
        yield from trajectories.check_seeds(
            rows, run_seed=recipe.seed, group_size=recipe.controller.group_size
        )
    if prompts is not None:
        expected = prompts.rows_at(rows["submission_index"].to_pylist())
        yield from trajectories.check_prompts(rows, expected)


def _not_prepared() -> Finding:
    return Finding(
        "not-prepared",
        "steps.lance",
        "a prepared run",
        "no ledger and no policy yet",
        "wait, or remove it if nobody is on it: there is nothing to resume",
        "note",
    )


def _not_judged() -> Finding:
    return Finding(
        "not-judged",
        "trajectories.lance",
        "every trajectory",
        "some cannot be read: ledger and trajectories were not compared",
        "mend what cannot be read, then check again",
        "note",
    )


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield small pieces together."""
    sources: list[str] = []
    tables: list[pa.Table] = []
    num_bytes = 0
    for piece in pieces:
        if piece.rows is None:
            yield piece
            continue
        sources.append(piece.source)
        tables.append(piece.rows)
        num_bytes += piece.rows.nbytes
        if num_bytes >= BYTES_AT_ONCE:
            yield _together(sources, tables)
            sources, tables, num_bytes = [], [], 0
    if tables:
        yield _together(sources, tables)


def _together(sources: Sequence[str], tables: Sequence[pa.Table]) -> Piece:
    first, last = sources[0], sources[-1]
    source = first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"
    return Piece(source, pa.concat_tables(tables))
