"""Audits a run from its directory alone, from where the last clean audit ended.

A run that goes on, or that crashed, can be audited as well. What follows ledger rows (checkpoints,
weights) is listed before the ledger is read, and what precedes them (trajectories) is read after
it, so that each row finds what it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import ArealFlowError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.program import CODE_VERSION
from areal_flow.log.audit import files
from areal_flow.log.audit.files import VersionGone, check_schema, scan
from areal_flow.log.audit.rules import ADVICE, AuditDatabase, Finding, Report, unreadable
from areal_flow.log.audit.verified import (
    Verified,
    forget_verified,
    read_verified,
    record_verified,
)
from areal_flow.log.codec import is_dropped
from areal_flow.log.dataset import (
    Log,
    conjunction,
    fence_condition,
    open_dataset,
    read_errors,
)
from areal_flow.log.index import Index, read_index
from areal_flow.log.inputs import read_inputs
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.openenv import OpenEnv
from schemas import EvaluationRow, StepRow, TrajectoryRow

KINDS = (
    "steps",
    "prompts",
    "trajectories",
    "checkpoints",
    "published weights",
    "evaluation answers",
)
MAX_READINGS = 5
"""A run that goes on may commit faster than it is read."""


OnProgress = Callable[[int, int], object]
"""Takes how many trajectories were read, of how many."""


def check_run(
    layout: RunLayout, *, full: bool = False, on_progress: OnProgress | None = None
) -> Report:
    """Audit a run; what an earlier audit verified is read again only if `full`.

    A clean run is recorded as verified; nothing else is changed.
    """
    report = Report(layout.name, KINDS)
    if not layout.config.is_file():
        advice = "restore it from a copy: nothing was checked without it"
        report.add(unreadable(layout.config.name, "no such file", advice))
    elif files.not_prepared(layout):
        what = (layout.steps.name, "a prepared run", "no ledger and no policy yet")
        report.add(Finding("not-prepared", *what, ADVICE["unprepared"], "note"))
    else:
        verified = Verified() if full else read_verified(layout)
        return _read(layout, verified, on_progress or (lambda done, total: None))
    return report


def _read(layout: RunLayout, verified: Verified, on_progress: OnProgress) -> Report:
    """Read the run, again if a version that was being read was cleaned up."""
    past, first_step = verified.past, verified.first_step
    for _ in range(MAX_READINGS):
        report = Report(layout.name, KINDS, verified.as_json())
        try:
            with (
                TemporaryDirectory(prefix="areal-flow-check-") as folder,
                closing(AuditDatabase(past, first_step=first_step, folder=folder)) as database,
            ):
                _Audit(layout, database, report, verified, on_progress).read()
        except VersionGone as gone:
            overtaken = str(gone)
            continue
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:  # values that satisfy the schema, and no arithmetic
            damaged = unreadable(layout.steps.name, error, ADVICE["both"])
            report.add(damaged._replace(expected="numbers that can be counted again"))
        return report
    report = Report(layout.name, KINDS)
    reason = f"it was cleaned up before it was read, {MAX_READINGS} times"
    what = (overtaken, "a version that stays while it is read", reason)
    report.add(Finding("not-judged", *what, ADVICE["overtaken"]))
    return report


@dataclass(frozen=True, slots=True)
class _Audit:
    layout: RunLayout
    database: AuditDatabase
    report: Report
    verified: Verified
    on_progress: OnProgress

    def read(self) -> None:
        layout, database = self.layout, self.database
        recipe = self._recipe()
        self._inputs()
        if not (layout.steps.exists() or layout.trajectories.exists()):
            self._before_training(recipe)
            return
        checkpoints, published = files.listed_checkpoints(layout), files.listed_weights(layout)
        for kind, paths in (("checkpoint", checkpoints), ("weights", published)):
            database.add("files", ({"kind": kind, "step": int(path.name)} for path in paths))
        index = read_index(layout)  # before the logs, which then have all that it has
        has_ledger = self._ledger([*checkpoints, *published])
        database.add("forks", self._kept(files.read_forks(layout)))
        database.add("parents", self._kept(files.read_parents(layout)))
        has_log = self._log(recipe)
        if has_ledger and not self.report.checked["steps"]:
            self._before_training(recipe)
        if has_ledger:
            self._judge("ledger")
        if has_ledger and has_log:
            database.add("dataset", [{"num_rows": self._num_rows("trajectories")}])
            database.recount()
            self._judge("log")
            if self.report.clean:  # else it would differ for what was found already
                self._index(index)
        self._files(checkpoints, published)
        since = self.verified.evaluation_watermark
        num_answers = 0
        if layout.evaluations.exists():
            num_answers = self._num_rows("evaluations")
            kinds = ("evaluation answers", "evaluations")
            list(self._rows("evaluations", EvaluationRow, *kinds, since=since))
        self.report.add(*files.broken_descriptions(layout))
        self.report.add(*files.changed_chat_template(layout))
        self.report.add(*files.leftovers(layout))
        if not self.report.clean:
            forget_verified(layout)
        elif has_ledger and has_log and self.report.checked["steps"]:
            record_verified(layout, database.settled(), evaluation_watermark=num_answers)

    def _num_rows(self, log: Log) -> int:
        path = getattr(self.layout, log)
        with suppress(ArealFlowError), read_errors(path):
            return int(open_dataset(path).count_rows())
        return 0  # what cannot be read becomes a finding

    def _before_training(self, recipe: Recipe | None) -> None:
        if recipe is not None:
            self.report.add(files.before_training(self.layout, recipe))

    def _judge(self, rules: str) -> None:
        for finding in self.database.broken(rules):
            self.report.add(finding)

    def _kept(
        self, values: Iterable[dict[str, Any] | Finding], counted: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield what could be read; report the rest."""
        for value in values:
            if counted:
                self.report.checked[counted] += 1
            if isinstance(value, Finding):
                self.report.add(value)
            else:
                yield value

    def _rows(
        self,
        log: Log,
        model: type[pa_polars.DataFrameModel],
        counted: str,
        kind: str,
        *,
        where: str | None = None,
        since: int = 0,
    ) -> Iterator[pa.Table | None]:
        """Check a dataset's rows; yield those that rules can use, None for others."""
        where = conjunction(where, fence_condition(self.layout, log))
        for batch in scan(getattr(self.layout, log), where, since=since):
            rows = None
            if isinstance(batch, Finding):
                self.report.add(batch)
            else:
                self.report.checked[counted] += len(batch.rows)
                findings, rows = check_schema(batch, model, kind=kind)
                self.report.add(*findings)
            yield rows

    def _recipe(self) -> Recipe | None:
        try:
            recipe = load_recipe(self.layout.config)
        except (ArealFlowError, OSError) as error:
            self.report.add(unreadable(self.layout.config.name, error))
            return None
        row = {
            "config_hash": recipe.digest(),
            "code_version": CODE_VERSION,
            "seed": recipe.seed,
            "group_size": recipe.controller.group_size,
            "groups_per_step": recipe.groups_per_step,
            "max_staleness": recipe.controller.max_staleness,
            "pass_threshold": recipe.pass_threshold,
        }
        self.database.add("recipe", [row])
        return recipe

    def _inputs(self) -> None:
        try:
            recorded = read_inputs(self.layout)
        except RunError as error:
            self.report.add(unreadable(self.layout.inputs.name, error))
            return
        named = recorded.verifiers
        rows = ({"since_epoch": epoch, "verifier": verifier} for epoch, verifier in named)
        self.database.add("verifiers", rows)
        self.report.add(*files.changed_inputs(self.layout, recorded))

    def _ledger(self, named_by: Sequence[Path]) -> bool:
        """Read the ledger's rows since the base, and what checkpoints, weights and forks name."""
        where = None
        if first_step := self.verified.first_step:
            forks = (fork for fork in files.read_forks(self.layout) if isinstance(fork, dict))
            named = {0, *(int(path.name) for path in named_by), *(fork["step"] for fork in forks)}
            where = f"step >= {first_step} OR step IN ({', '.join(map(str, sorted(named)))})"
        return self.database.add_ledger(
            self._rows("steps", StepRow, "steps", "ledger", where=where)
        )

    def _log(self, recipe: Recipe | None) -> bool:
        prompts = self._prompts(recipe)
        all_read = True
        since = self.verified.past.watermark
        num_rows, num_read = self._num_rows("trajectories") - since, 0
        kinds = ("trajectories", "log")
        for rows in _read_ahead(self._rows("trajectories", TrajectoryRow, *kinds, since=since)):
            if rows is None:
                all_read = False
                continue
            if num_dropped := pc.sum(is_dropped(rows)).as_py():
                self.report.checked["trajectories without tokens"] += num_dropped
            num_read += len(rows)
            self.on_progress(num_read, max(num_rows, num_read))
            expected = _prompts_of(rows, prompts) if prompts else None
            # An agent's messages and an environment's observations are not in the prompt table.
            if expected and recipe and isinstance(recipe.workflow, Agent | OpenEnv):
                column = expected.schema.get_field_index("prompt_tokens")
                expected = expected.set_column(column, "prompt_tokens", rows["prompt_tokens"])
            self.report.add(*self.database.add_trajectories(rows, expected))
        if not all_read:
            description = "some cannot be read: ledger and trajectories were not compared"
            what = (self.layout.trajectories.name, "every trajectory", description)
            self.report.add(Finding("not-judged", *what, ADVICE["unjudged"], "note"))
        return all_read

    def _index(self, index: Index) -> None:
        paths = [self.layout.index / part for part in index.parts]
        if not paths or not all(path.is_file() for path in paths):
            return  # a run that goes on has replaced them
        try:
            self.database.add_index(paths, watermark=index.past.watermark)
            self._judge("index")
        except duckdb.Error as error:
            self.report.add(unreadable(self.layout.index.name, error, ADVICE["index"]))

    def _prompts(self, recipe: Recipe | None) -> PromptTable | None:
        if recipe is None:
            return None
        prompts = files.read_prompts(self.layout, seed=recipe.seed)
        if isinstance(prompts, Finding):
            self.report.add(prompts)
            return None
        self.report.checked["prompts"] = len(prompts)
        for path in (self.layout.train_prompts, self.layout.held_out_prompts):
            with suppress(OSError, pa.ArrowException):  # the table itself is judged elsewhere
                table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
                self.database.add_prompts(path.name, table)
        self._judge("prompts")
        return prompts

    def _files(self, checkpoints: Sequence[Path], published: Sequence[Path]) -> None:
        directories = files.read_directories(self.layout, "checkpoint", checkpoints)
        self.database.add("checkpoints", self._kept(directories, "checkpoints"))
        directories = files.read_directories(self.layout, "weights", published)
        self.database.add("published", self._kept(directories, "published weights"))
        # A replay that forked since the ledger was judged has published its weights again.
        forks = (fork for fork in files.read_forks(self.layout) if isinstance(fork, dict))
        self.database.add("forks", forks)
        self._judge("files")


def _read_ahead(batches: Iterator[pa.Table | None]) -> Iterator[pa.Table | None]:
    """Yield each batch while a thread reads the next."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        reading: Future[Any] = thread.submit(next, batches, end)
        while (batch := reading.result()) is not end:
            reading = thread.submit(next, batches, end)
            yield batch


def _prompts_of(rows: pa.Table, prompts: PromptTable) -> pa.Table:
    """Return the prompt of each row; members of a group share it."""
    submissions = rows["submission_index"].combine_chunks().dictionary_encode()
    return prompts.rows_at(submissions.dictionary.to_pylist()).take(submissions.indices)
