"""The rules of a run directory: queries over its ledger and log as tables of an in-memory DuckDB.

Rules stand in `sql/`, each under its name and its advice. A rule returns a row (where, expected,
found) for each place that breaks it, which becomes a finding of the report. A finding of severity
error is damage or a bug; a note is what a crash leaves behind and nobody reads. Nothing here reads
a run.

    base          what an earlier audit verified: what follows is verified now
    ledger        every row from `base.first_step` on, `place` being how findings name it
    steps         the first row of each step of it
    recorded      `steps`, and earlier ones that files name
    facts         a batch of trajectories
    log           every trajectory that was read
    trajectories  the first commit of each id
    consumed      each trajectory that a step trained or discarded, as often as a row says so
    placed        `consumed`, and the place and watermark of the row that says so
    recounted     `steps` after `base`, with the same numbers counted from the log: `log_...`
    batch_metrics what the log has for each entry of `metrics` that a step's batch makes
    indexed       rows of the index's files, but those verified before
    repeated_ids  ids of the prompt tables that several prompts share
    forks, parents, recipe, files, checkpoints, published, dataset: see `sql/tables.sql`
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.log.codec import content_hashes, is_dropped
from areal_flow.log.database import empty_database, parquet_files, read_sql
from areal_flow.log.ledger import STEPS
from areal_flow.log.ledger_row import batch_digest, member_seed
from areal_flow.log.settled import NOTHING_SETTLED, SettledPast, advance_in

_RULE = re.compile(r"^-- rule (\S+): (\S+)\n", re.MULTILINE)
_PROMPT_COLUMNS = ("source", "prompt_id", "difficulty", "prompt_tokens")


Severity = Literal["error", "note"]

MEMORY_LIMIT = "350 MB"
CONSUMED_TOKENS = ("num_trained_tokens", "num_masked_tokens", "num_discarded_tokens")
_LEDGER_ROW = """
SELECT * EXCLUDE (
    trajectory_ids, discarded, importance_weight_means, importance_weight_maxima
), 'step ' || step AS place FROM batch"""
_NAMED = "SELECT step, trajectory_id, status, reason FROM consumed_by('batch')"
"""The ids that rows of the ledger name, a row each: as lists they do not fit into memory."""
IDS_AT_ONCE = 1 << 16
"""Of the ledger's rows that are taken in together: a scan of a table reads 2,048 lists at once."""
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
    "recipe": "config.toml was changed: restore its settings, since a run keeps its recipe",
    "verifier": "inputs.json or a log was changed, or the verifier during the run: do not "
    "compare rewards across the change",
    "parent": "run.json, the ledger or that of the parent was changed: restore them from a copy",
    "orphan": "nothing, if the parent was removed or moved: the run no longer needs it",
    "checkpoint": "remove it, and --resume continues from an older one; restore checkpoint 0 "
    "from a copy",
    "description": "copy these files from model/ into it: its weights are unchanged",
    "closed": "make it readable, then check again: it may or may not be damaged",
    "disagree": "one of the two was changed: restore it from a copy; until then remove neither",
    "weights": "remove it: --resume publishes the newest version again",
    "file": "restore it from a copy",
    "harmless": "nothing: it is not used",
    "index": "remove the folder index: the run's next checkpoint makes it again",
    "unprepared": "wait, or remove it if no process is preparing it: there is nothing to resume",
    "before": "nothing: --resume continues from there",
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

    def __init__(
        self, run: str, kinds: Iterable[str] = (), verified_before: dict[str, Any] | None = None
    ) -> None:
        self.run = run
        self.verified_before = verified_before
        """Up to which step an earlier audit found the run clean, and when."""
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
            "verified_before": self.verified_before,
            "findings": [finding._asdict() for finding in self.findings],
        }


class AuditDatabase:
    """Tables of one run: filled first, then checked. What memory cannot hold goes to a folder."""

    def __init__(
        self, past: SettledPast = NOTHING_SETTLED, *, first_step: int = 0, folder: str = ""
    ) -> None:
        self.past = past
        self._connection = empty_database()
        if folder:
            self._connection.execute(f"SET temp_directory = '{folder}'")
            self._connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        # Compressed, rows take a fifth of the memory, and need not go to the folder.
        self._connection.execute("ATTACH ':memory:' AS audit (COMPRESS); USE audit")
        # Rules name what they find in their own order.
        self._connection.execute("SET preserve_insertion_order = false")
        self._connection.create_function("seed_of", member_seed, ["BIGINT"] * 3, "BIGINT")
        self._connection.execute(read_sql("tokens") + read_sql("passing") + _sql("tables"))
        base = {"step": past.step, "first_step": first_step, "num_tokens": past.num_tokens}
        base["num_consumed_tokens"] = sum(getattr(past, name) for name in CONSUMED_TOKENS)
        base["next_open_submission"] = past.next_open_submission
        self.add("base", [base])
        self.add("closed", ({"submission_index": index} for index in past.closed_submissions))
        self._rules = [*rules_of("trajectories")]

    def close(self) -> None:
        self._connection.close()

    def add_ledger(self, tables: Iterable[pa.Table | None]) -> bool:
        """Keep what rules read of the ledger; nothing, and return False, if a table is None."""
        created = f"CREATE TABLE read_ledger AS {_LEDGER_ROW}; CREATE TABLE named AS {_NAMED}"
        self._connection.execute(read_sql("consumed"))
        self._with("batch", _with_batch_facts(STEPS.empty_table()), created)
        is_complete, earlier_steps = True, set[int]()
        for rows in tables:
            if rows is None:
                is_complete = False
                continue
            for portion in _portions(rows.select(STEPS.names)):
                self._add_portion(portion, earlier_steps)
        if not is_complete:
            self._connection.execute("DELETE FROM read_ledger; DELETE FROM named")
        self._connection.execute(_sql("ledger_tables"))
        self._keep_repeated("consumed_twice", "consumed")
        self._connection.execute(_sql("consumed"))
        return is_complete

    def _add_portion(self, rows: pa.Table, earlier_steps: set[int]) -> None:
        self._with("batch", _with_batch_facts(rows), f"INSERT INTO read_ledger {_LEDGER_ROW}")
        firsts = []
        for step in rows["step"].to_pylist():
            firsts.append(step not in earlier_steps)
            earlier_steps.add(step)
        named = rows.filter(pa.array(firsts, pa.bool_()))
        self._with("batch", named, f"INSERT INTO named {_NAMED}")

    def add_trajectories(self, rows: pa.Table, prompts: pa.Table | None = None) -> list[Finding]:
        """Keep what later rules read of these rows; return what breaks the rules of each alone.

        Args:
            prompts: rows of the prompt table, of the same submissions.
        """
        hashes = pa.array(content_hashes(rows), pa.string())
        found_hashes = pc.if_else(is_dropped(rows), rows["content_hash"], hashes)
        batch = rows.append_column("found_hash", found_hashes)
        for name in _PROMPT_COLUMNS:
            batch = batch.append_column(f"expected_{name}", (prompts or rows)[name])
        self._with("batch", batch, _sql("insert_log"))
        return [*self._broken(self._rules)]

    def add_prompts(self, place: str, prompts: pa.Table) -> None:
        self._with(
            "prompts",
            prompts,
            f"INSERT INTO repeated_ids SELECT '{place}', prompt_id, "
            "count(DISTINCT hash(prompt, answer, metadata)) AS num_prompts "
            "FROM prompts GROUP BY source, prompt_id HAVING num_prompts > 1",
        )

    def add(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if added := list(rows):
            statement = f"INSERT INTO {table} BY NAME FROM added"
            self._with("added", pa.Table.from_pylist(added), statement)

    def add_index(self, files: Sequence[Path], *, watermark: int) -> None:
        """Add the index's files, which have all trajectories below a watermark."""
        rows = f"FROM {parquet_files(self._connection, files)}"
        self._connection.execute(
            f"CREATE VIEW indexed AS {rows} WHERE commit_order >= {self.past.watermark};"
            f"CREATE MACRO is_indexed(commit_order) AS commit_order < {watermark}"
        )

    def recount(self) -> None:
        """Count the ledger's numbers again, once all other tables are complete."""
        self._keep_repeated("logged_twice", "log")
        self._connection.execute(_sql("recounted"))

    def broken(self, name: str) -> Iterator[Finding]:
        """Yield findings of the rules in a file."""
        yield from self._broken(rules_of(name))

    def settled(self) -> SettledPast:
        """Return the past up to the newest step of a ledger and a log without findings."""
        return advance_in(self._connection, self.past)

    def _broken(self, rules: Iterable[tuple[str, str, str]]) -> Iterator[Finding]:
        for rule, advice, query in rules:
            result = self._connection.execute(f"FROM (\n{query}) ORDER BY 1")
            while row := result.fetchone():
                where, expected, value = row
                yield Finding(rule, where, str(expected), str(value), ADVICE[advice])

    def _keep_repeated(self, name: str, table: str) -> None:
        """Keep hashes of the ids that a table has more than once: sorted, since it has millions."""
        ((number,),) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        read = self._connection.sql(f"SELECT hash(trajectory_id) AS hashed FROM {table}")
        hashes, end = np.empty(number, np.uint64), 0
        for batch in read.to_arrow_reader():
            begin, end = end, end + len(batch)
            hashes[begin:end] = batch["hashed"].to_numpy()
        hashes.sort()
        repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        self._with("hashes", pa.table({"hashed": repeated}), f"CREATE TABLE {name} AS FROM hashes")

    def _with(self, name: str, table: pa.Table, statements: str) -> None:
        self._connection.register(name, table)
        self._connection.execute(statements)
        self._connection.unregister(name)


def _with_batch_facts(rows: pa.Table) -> pa.Table:
    """Add what rules ask of each row's ids; DuckDB's functions of lists take five times as long."""
    versions, batches = rows["policy_version"].to_pylist(), rows["trajectory_ids"].to_pylist()
    facts = {
        "found_digest": pa.array(map(batch_digest, versions, batches), pa.string()),
        "is_sorted": pa.array((ids == sorted(ids) for ids in batches), pa.bool_()),
        "num_trained": pa.array(map(len, batches), pa.int64()),
        "num_groups": pa.array(
            (len({each.partition("-")[0] for each in ids}) for ids in batches), pa.int64()
        ),
    }
    for name, values in facts.items():
        rows = rows.append_column(name, values)
    return rows


def _portions(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield rows of the ledger, some with about `IDS_AT_ONCE` ids at a time."""
    ends = np.cumsum(pc.list_value_length(rows["trajectory_ids"]).to_numpy())
    cuts = np.flatnonzero(np.diff(ends // IDS_AT_ONCE, prepend=0)).tolist()
    for begin, end in pairwise([0, *(cut for cut in cuts if cut), len(rows)]):
        yield rows.slice(begin, end - begin)


def rules_of(name: str) -> Iterator[tuple[str, str, str]]:
    _, *parts = _RULE.split(_sql(name).replace(";", ""))
    yield from zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def _sql(name: str) -> str:
    return read_sql(name, package="areal_flow.log.audit")
