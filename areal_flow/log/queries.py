"""Reads a run directory as pandas, polars, Arrow or DuckDB tables, even while the run goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import PromptError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.core.types import as_tokens
from areal_flow.log.codec import row_arrays
from areal_flow.log.database import (
    CONSUMPTION_COLUMNS,
    LEDGER_COLUMNS,
    LOG_COLUMNS,
    TableFormat,
    connect,
    consumption_table,
    convert,
    convert_relation,
    empty_database,
    parquet_files,
    quoted,
)
from areal_flow.log.dataset import (
    COMMIT_ORDER,
    Log,
    conjunction,
    fence_condition,
    open_dataset,
    read_rows,
)
from areal_flow.log.directory import check_schema_version, find_run
from areal_flow.log.index import INDEXED, index_tables, read_index
from areal_flow.log.ledger import STEPS, read_steps
from areal_flow.log.lineage import Lineage
from areal_flow.log.trajectories import find_trajectories
from areal_flow.policy.tokenizer.directory import texts_of, tokenizer_of
from areal_flow.rollout.prompts.rows import value_at

if TYPE_CHECKING:
    from tokenizers import Tokenizer
_LANCE_PREFIX = "Invalid user input: "
_LANCE_LOCATION = re.compile(r"\.?,? /\S+\.rs:\d+:\d+")
PROMPT_COLUMN = "metadata."
"""Prefix of the columns that come from the prompt's row."""
MAX_ROWS_IN_MEMORY, MAX_TOKENS_IN_MEMORY = 10_000, 10_000_000
"""Of a query's result that is read by row. A larger one is a scan of the log."""
_PASS_RATES = """
SELECT sha256(sampled.prompt) AS prompt_hash, avg(passed::DOUBLE) AS pass_rate,
    count(*) AS num_samples
FROM trajectories JOIN (SELECT DISTINCT prompt_tokens, prompt FROM prompts) AS sampled
    USING (prompt_tokens)
WHERE reward IS NOT NULL GROUP BY ALL ORDER BY ALL
"""


class Run:
    """Reads a run; never writes. Every call sees the newest committed state."""

    def __init__(self, path: Path | str) -> None:
        self.layout = RunLayout(Path(path).resolve())
        if not self.layout.config.is_file():
            raise RunError(f"expected a run directory at {path}, found no config.toml there")
        check_schema_version(self.layout)

    def __repr__(self) -> str:
        return f"Run({str(self.layout.root)!r})"

    def trajectories(
        self,
        format: TableFormat = "pandas",
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        step: int | None = None,
        at: int | None = None,
        text: bool = False,
    ) -> Any:
        """Return the trajectories, one row each.

        Args:
            format: "pandas" (Arrow-backed), "polars", "arrow" (a `pyarrow.Table`) or "duckdb" (a
                lazy relation that pushes filters and projections down into the dataset).
            columns: read only these; "metadata.kind" is the column `kind` of the prompt's row,
                "metadata.a.b" the field `b` in its column `a`.
            where: an SQL condition, evaluated by Lance: "reward = 1 AND difficulty > 4".
            step: only those that this step trained or discarded.
            at: time travel: only trajectories that were in the log when this step was recorded.
            text: add prompt and completion as text, `status`, `step`, `reason` and the other
                columns of the view in `database`; DuckDB then evaluates `columns` and `where`.

        Raises:
            RunError: there is no step `step` or `at`, or a column or condition is invalid.
        """
        if _names_prompt_columns(columns):
            read = partial(self.trajectories, "arrow", where=where, step=step, at=at, text=text)
            prompts = self.layout.train_prompts
            table = _with_prompt_columns(read, columns or (), prompts, source="source")
            return convert(table, format)
        if step is not None:
            stored, ledger = self._rows_of_step(step)
            if text:
                view = self._database_of(stored, consumption_table(ledger, stored))
                return _convert_view(view.table("trajectories"), format, columns, where)
            return _convert_view(empty_database().from_arrow(stored), format, columns, where)
        if text:
            return self._read_view(format, columns, where, at)
        if at is not None:
            where = conjunction(where, f"{COMMIT_ORDER} < {self._watermark(at)}")
        return self._read("trajectories", format, columns, where)

    def steps(
        self,
        format: TableFormat = "pandas",
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
    ) -> Any:
        """Return the step ledger, whose row 0 is the initial policy; arguments as `trajectories`.

        Each metric of the algorithm is a column too, but `where` cannot name it.
        """
        with _explained_errors("steps", columns, where, STEPS.names):
            steps = read_steps(self.layout, columns, where)
        return convert(steps, format)

    def evaluations(
        self,
        format: TableFormat = "pandas",
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
    ) -> Any:
        """Return held-out answers, one row each; arguments as `trajectories`."""
        if _names_prompt_columns(columns):
            read = partial(self.evaluations, "arrow", where=where)
            prompts = self.layout.held_out_prompts
            table = _with_prompt_columns(read, columns or (), prompts, source="held_out")
            return convert(table, format)
        return self._read("evaluations", format, columns, where)

    def consumption(self, format: TableFormat = "pandas", *, at: int | None = None) -> Any:
        """Return the status of every trajectory: trained, discarded or waiting.

        Columns are `trajectory_id`, `writer_epoch`, `status`, `step` (which trained or discarded
        it), `policy_version` (which that step started from), `reason` (of a discard),
        `importance_weight_mean` and `importance_weight_max`.

        Args:
            at: time travel: the status when this step was recorded.

        Raises:
            RunError: there is no step `at`.
        """
        if at is None:
            with closing(self.indexed()) as index:
                table = index.table("indexed").select(*CONSUMPTION_COLUMNS).to_arrow_table()
            return convert(table, format)
        steps = self.steps("arrow", columns=LEDGER_COLUMNS, where=_until(at))
        log = self.trajectories("arrow", columns=LOG_COLUMNS, at=at)
        return convert(consumption_table(steps, log), format)

    def trajectory(self, trajectory_id: str) -> dict[str, Any]:
        """Return one trajectory, with every column of the view in `database`.

        Raises:
            RunError: the log has no such trajectory.
        """
        with closing(self.selected(f"trajectory_id = {quoted(trajectory_id)}")) as database:
            return self.find_row(database, trajectory_id)

    def find_row(self, database: Any, trajectory_id: str) -> dict[str, Any]:
        """Return one trajectory, read over a connection from `database`."""
        result = database.sql(
            "SELECT * FROM trajectories WHERE trajectory_id = ?", params=[str(trajectory_id)]
        )
        rows: list[dict[str, Any]] = result.to_arrow_table().to_pylist()
        if not rows:
            raise RunError(
                f"{self.layout.name} has no trajectory {trajectory_id!r}: expected one of "
                "run.trajectories().trajectory_id, such as '00000001-0000-00'"
            )
        return rows[0]

    def lineage(self, version: int) -> Lineage:
        """Return the lineage of a policy version; a version is a step.

        Raises:
            RunError: there is no such step.
        """
        self._watermark(version)
        return Lineage(self, version)

    def database(self, *, at: int | None = None) -> Any:
        """Return a DuckDB connection with `trajectories`, `steps` and the other views.

        `areal_flow.log.database` lists the columns; `docs/cookbook.md` has examples.

        Args:
            at: time travel, as in `trajectories`; the ledger ends with this step.
        """
        tables = {
            "stored": open_dataset(self.layout.trajectories),
            "consumption": self.consumption("arrow", at=at),
            "steps": self.steps("arrow", where=_until(at)),
            "prompts": self.prompts(),
        }
        if self.layout.evaluations.exists():
            tables["stored_evaluations"] = self.evaluations("arrow")
        return self.connect(tables)

    def indexed(self) -> Any:
        """Return a DuckDB connection with the view `indexed`: `trajectories` without tokens.

        It has the columns of `database`'s `trajectories` but tokens, texts and hashes, and
        `commit_order`. It is fast to search, however long the run is: of most rows it reads files
        that were written with the run's checkpoints (`areal_flow.log.index`), which the next but
        one checkpoint may remove.
        """
        index = read_index(self.layout)
        connection = self.connect(index_tables(self.layout, index.past))
        rows = INDEXED
        if index.parts:
            files = parquet_files(connection, [self.layout.index / part for part in index.parts])
            rows = f"FROM {files} UNION ALL BY NAME {rows}"
        connection.execute(f"CREATE VIEW indexed AS {rows}")
        return connection

    def selected(self, where: str) -> Any:
        """Return a `database` of only the trajectories that satisfy a condition over `indexed`.

        Its rows are in memory; it has no steps.
        """
        with closing(self.indexed()) as index:
            return self._with_tokens(index.table("indexed").filter(where))

    def _with_tokens(self, matching: Any) -> Any:
        rows = matching.select("commit_order", *CONSUMPTION_COLUMNS).to_arrow_table()
        orders = ", ".join(map(str, rows["commit_order"].to_pylist()))
        stored = read_rows(
            self.layout, "trajectories", where=f"{COMMIT_ORDER} IN ({orders or 'NULL'})"
        )
        return self._database_of(stored, rows)

    def _database_of(self, stored: pa.Table, consumption: pa.Table) -> Any:
        tables = {"stored": stored, "consumption": consumption, "prompts": self.prompts()}
        return self.connect(tables)

    def _rows_of_step(self, step: int) -> tuple[pa.Table, pa.Table]:
        """Return the trajectories that a step trained or discarded, and its row of the ledger."""
        columns = [*LEDGER_COLUMNS, "trajectory_watermark"]
        row = self.steps("arrow", columns=columns, where=f"step = {step}")
        if not len(row):
            raise RunError(f"{self.layout.name} has no step {step} yet")
        identifiers = pc.list_flatten(row["trajectory_ids"]).to_pylist()
        identifiers += pc.struct_field(
            pc.list_flatten(row["discarded"]), "trajectory_id"
        ).to_pylist()
        watermark = row["trajectory_watermark"][0].as_py()
        return find_trajectories(self.layout, identifiers, until=watermark), row

    def connect(self, tables: Mapping[str, Any]) -> Any:
        """Return a DuckDB connection over tables; with only `stored`, its one view is `logged`."""
        recipe = self.recipe
        return connect(
            tables,
            decode=self.decode,
            max_staleness=recipe.controller.max_staleness,
            pass_threshold=recipe.pass_threshold,
        )

    def prompts(self) -> pa.Table:
        """Return the training prompts, memory-mapped; an empty table if there is no file."""
        if not self.layout.train_prompts.is_file():
            names = ("source", "prompt_id", "prompt", "answer", "metadata")
            return pa.table(dict.fromkeys(names, pa.array([], "str")))
        return pa.ipc.open_file(pa.memory_map(str(self.layout.train_prompts))).read_all()

    @property
    def recipe(self) -> Recipe:
        """The current recipe, which a resume may have changed."""
        return load_recipe(self.layout.config)

    @property
    def pass_threshold(self) -> float:
        """The reward above which a completion passes."""
        return self.recipe.pass_threshold

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.layout.model)

    def decode(self, tokens: Any) -> pa.Array:
        """Return the texts of a column of token ids, without special tokens."""
        is_arrow = isinstance(tokens, pa.Array | pa.ChunkedArray)
        rows = row_arrays(tokens) if is_arrow else map(as_tokens, tokens)
        return pa.array(texts_of(self.tokenizer, [*rows]), pa.string())

    def summary(self) -> dict[str, Any]:
        """Return the summary of a finished run.

        Raises:
            RunError: the run has not finished.
        """
        if not self.layout.summary.is_file():
            raise RunError(f"{self.layout.name} has no summary yet")
        summary: dict[str, Any] = json.loads(self.layout.summary.read_text())
        return summary

    def _watermark(self, step: int) -> int:
        watermarks = self.steps("arrow", columns=["trajectory_watermark"], where=f"step = {step}")
        if not len(watermarks):
            raise RunError(f"{self.layout.name} has no step {step} yet")
        return int(watermarks["trajectory_watermark"][0].as_py())

    def _read(
        self, log: Log, format: TableFormat, columns: Sequence[str] | None, where: str | None
    ) -> Any:
        if match := re.search(rf"\b{re.escape(PROMPT_COLUMN)}\w+", where or ""):
            raise RunError(
                f"where: {match[0]} is no stored column; expected it in `columns`, to filter the "
                "table by it then"
            )
        needs_lance = fence_condition(self.layout, log) or COMMIT_ORDER in (where or "")
        stored = open_dataset(getattr(self.layout, log))
        with _explained_errors(log, columns, where, stored.schema.names):
            if format == "duckdb" and not needs_lance:
                relation = empty_database().from_arrow(stored)
                relation = relation.filter(where) if where else relation
                return relation.select(*columns) if columns else relation
            rows = read_rows(self.layout, log, columns, where)
        return convert(rows, format)

    def _read_view(
        self,
        format: TableFormat,
        columns: Sequence[str] | None,
        where: str | None,
        at: int | None,
    ) -> Any:
        if at is None and (columns or where):
            with suppress(
                duckdb.Error
            ):  # a column with tokens, or an error, which is explained below
                return self._read_index(format, columns, where)
        return _convert_view(self.database(at=at).table("trajectories"), format, columns, where)

    def _read_index(
        self, format: TableFormat, columns: Sequence[str] | None, where: str | None
    ) -> Any:
        """Answer from the index, or from the rows that it finds if these are few."""
        matching = self.indexed().table("indexed")
        matching = matching.filter(where) if where else matching
        if columns:
            with suppress(duckdb.BinderException):
                return convert_relation(matching.select(*columns), format)
        num_rows, num_tokens = matching.aggregate("count(*), sum(num_tokens)").fetchall()[0]
        few = num_rows <= MAX_ROWS_IN_MEMORY and (num_tokens or 0) <= MAX_TOKENS_IN_MEMORY
        database = self._with_tokens(matching) if few else self.database()
        return _convert_view(
            database.table("trajectories"), format, columns, None if few else where
        )


def _convert_view(
    relation: Any,
    format: TableFormat,
    columns: Sequence[str] | None,
    where: str | None = None,
) -> Any:
    with _explained_errors("", columns, where, sorted(relation.columns)):
        relation = relation.filter(where) if where else relation
        return convert_relation(relation.select(*columns) if columns else relation, format)


@contextmanager
def _explained_errors(
    log: str, columns: Sequence[str] | None, where: str | None, column_names: Sequence[str]
) -> Iterator[None]:
    """Turn errors in columns or conditions into a `RunError`; `log` is "" for the view."""
    try:
        yield
    except (duckdb.Error, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith(_LANCE_PREFIX):
            raise
        reason = str(error).splitlines()[0].removeprefix(_LANCE_PREFIX)
        reason = _LANCE_LOCATION.sub("", reason.removeprefix("Schema error: "))
        hint = "; text=True adds status, step, prompt and others" if log == "trajectories" else ""
        raise RunError(
            f"expected columns and a condition over {log or 'trajectories'}, found {columns} and "
            f"{where!r}: {reason.rstrip('.')}. Columns are: {', '.join(column_names)}{hint}"
        ) from None


def _until(step: int | None) -> str | None:
    return None if step is None else f"step <= {step}"


def _names_prompt_columns(columns: Sequence[str] | None) -> bool:
    return any(name.startswith(PROMPT_COLUMN) for name in columns or ())


def _with_prompt_columns(
    read: Callable[..., pa.Table], columns: Sequence[str], prompts: Path, *, source: str
) -> pa.Table:
    """Add columns of the prompts' rows to the table that `read` returns; null where there is none.

    Args:
        prompts: the file of prompts.
        source: the column of the table with the name of the prompt's source.
    """
    names = [name for name in columns if name.startswith(PROMPT_COLUMN)]
    table = read(columns=[*{*columns, source, "prompt_id"}.difference(names)])
    with pa.memory_map(str(prompts)) as file:
        prompt_rows = pa.ipc.open_file(file).read_all()
        keys, prompt_keys = _prompt_keys(table, source), _prompt_keys(prompt_rows, "source")
        indices = pc.index_in(keys, prompt_keys).to_pylist()
        rows = {
            index: json.loads(prompt_rows["metadata"][index].as_py())
            for index in {*indices} - {None}
        }
    for name in names:
        field = name.removeprefix(PROMPT_COLUMN)
        values = {index: value_at(row, field) for index, row in rows.items()}
        table = table.append_column(name, _json_column([values.get(index) for index in indices]))
    return table.select(columns)


def _prompt_keys(table: pa.Table, source: str) -> pa.Array:
    """Return a unique key per prompt, even if ids are unique only within a source."""
    is_main_set = pc.equal(table[source], HELD_OUT)
    sources = pc.if_else(is_main_set, "", table[source])
    return pc.binary_join_element_wise(sources, table["prompt_id"], "\n").combine_chunks()


def _json_column(values: list[Any]) -> pa.Array:
    """Return JSON values as a column, as text if their types differ or a number is too large."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])


def prompt_pass_rates(run: Run) -> pa.Table:
    """Return the pass rate of each prompt of a run, by the hash of the prompt's text."""
    with closing(run.database()) as database:
        rates: pa.Table = database.sql(_PASS_RATES).to_arrow_table()
    return rates


def record_pass_rates(layout: RunLayout, earlier: str) -> None:
    """Write an earlier run's pass rates into a run that selects its prompts by them.

    Args:
        earlier: the name or directory of that run.
    """
    parent = find_run(layout.root.parent, earlier)
    rates = prompt_pass_rates(Run(parent.root))
    if not len(rates):
        raise PromptError(
            f"prompts.difficulty.run = {earlier!r}: expected trajectories with a reward, found "
            "none there"
        )
    metadata = {"run": str(parent.root), "run_id": check_schema_version(parent)}
    layout.difficulty.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rates.replace_schema_metadata(metadata), layout.difficulty)
