"""Reads a run directory for an audit; whatever cannot be read becomes a finding.

Functions that read files come first, then those that read rows of datasets, in bounded batches, and
check their schema. Directories that a live run prunes during the audit are skipped. `rules` decides
which values are correct.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError

from areal_flow.config import Recipe
from areal_flow.core.digests import file_hash
from areal_flow.core.errors import ArealFlowError, ModelError, PromptError, RunError, WeightsError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import newest_lease
from areal_flow.log.audit.rules import ADVICE, Finding, unreadable
from areal_flow.log.codec import is_dropped
from areal_flow.log.dataset import (
    COMMIT_ORDER,
    conjunction,
    has_version,
    newest_fragments,
    open_dataset,
    read_errors,
    unreferenced_files,
)
from areal_flow.log.directory import Parent, find_parent, read_parent
from areal_flow.log.inputs import RunInputs, read_inputs
from areal_flow.log.ledger import LedgerReader
from areal_flow.policy.checkpoints import (
    RNG_STATE,
    checkpoint_path,
    is_recorded,
    list_checkpoints,
    read_checkpoint_state,
    weight_files,
)
from areal_flow.policy.tokenizer.directory import chat_template_of
from areal_flow.policy.weights.directory import DirectoryReader
from areal_flow.rollout.prompts.table import PromptTable
from schemas import arrow_schema, violations

ROWS_AT_ONCE = 256
"""Until it is known how long rows are."""
BYTES_AT_ONCE = 8 * 2**20
"""Target size of a validated batch: validating one row costs as much as validating many."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, SafetensorError, pa.ArrowException)


def read_forks(layout: RunLayout) -> Iterator[dict[str, Any] | Finding]:
    try:
        lines = layout.forks.read_text().splitlines() if layout.forks.exists() else []
    except (OSError, ValueError) as error:
        yield unreadable(layout.forks.name, error)
        return
    for number, line in enumerate(lines, 1):
        try:
            fork = json.loads(line)
            yield {
                "step": int(fork["step"]),
                "recorded_hash": str(fork["recorded"]["weights_hash"]),
                "weights_hash": str(fork["replayed"]["weights_hash"]),
                "served_hash": str(fork["replayed"]["served_hash"]),
            }
        except _UNREADABLE as error:
            yield unreadable(layout.forks.name, f"line {number}: {error!r}")


def read_parents(layout: RunLayout) -> Iterator[dict[str, Any] | Finding]:
    """Yield the parent that a fork recorded, and the weights hash in that parent's ledger."""
    try:
        parent = read_parent(layout)
    except _UNREADABLE as error:
        yield unreadable(layout.identity.name, error)
        return
    if parent is None:
        return
    ledger_hash, cause = _hash_by_ledger(layout, parent)
    if cause:
        what = (layout.identity.name, f"{parent}, to compare weights", cause)
        yield Finding("parent-not-compared", *what, ADVICE["orphan"], "note")
    yield {
        "name": parent.name,
        "step": parent.step,
        "weights_hash": parent.weights_hash,
        "ledger_hash": ledger_hash,
    }


def _hash_by_ledger(layout: RunLayout, parent: Parent) -> tuple[str | None, str]:
    """Return the weights hash of the fork's step in its parent's ledger, or why there is none."""
    parent_layout = find_parent(layout, parent)
    if parent_layout is None:
        return None, f"no run with its identity in {layout.root.parent}"
    try:
        with read_errors(parent_layout.steps):
            row = LedgerReader(parent_layout).row(parent.step, ["weights_hash"])
        if is_recorded(parent.step, parent.weights_hash, row, parent_layout.forks):
            return parent.weights_hash, ""
        return str(row["weights_hash"]), ""
    except ArealFlowError as error:
        return None, str(error)


def read_prompts(layout: RunLayout, *, seed: int) -> PromptTable | Finding:
    try:
        _validate_arrow(layout.train_prompts)
        return PromptTable(layout.train_prompts, seed=seed)
    except (*_UNREADABLE, PromptError) as error:
        return unreadable(layout.train_prompts.name, error)


def listed_checkpoints(layout: RunLayout) -> list[Path]:
    steps = sorted(int(path.name) for path in layout.checkpoints.glob("*") if path.name.isdigit())
    return [checkpoint_path(layout.checkpoints, step) for step in steps]


def listed_weights(layout: RunLayout) -> list[Path]:
    """Return the directories of the versions that the newest writer published."""
    root = _weights_root(layout)
    files = [file for name in ("model.safetensors", "hash") for file in root.glob(f"*/{name}")]
    directories = {file.parent for file in files if file.parent.name.isdigit()}
    return sorted(directories)


def read_directories(
    layout: RunLayout, kind: str, paths: Sequence[Path]
) -> Iterator[dict[str, Any] | Finding]:
    describe = partial(_checkpoint, layout)
    if kind == "weights":
        describe = partial(_weights, DirectoryReader(_weights_root(layout)))
    for path in paths:
        row: dict[str, Any] | Finding
        place, expected = path.relative_to(layout.root).as_posix(), "published weights"
        if kind == "checkpoint":
            place, expected = f"checkpoint {int(path.name)}", "a complete checkpoint"
        try:
            row = {"place": place, **describe(path)}
        except (*_UNREADABLE, WeightsError) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            row = Finding(f"{kind}-unreadable", place, expected, cause, _advice(kind, path))
        if kind == "checkpoint" and _has_damaged_base(path, row):
            what = (place, "intact base weights in checkpoint 0", "damaged weights")
            row = Finding("not-judged", *what, ADVICE["unjudged"], "note")
        if path.exists():  # not pruned meanwhile
            yield row


def _advice(kind: str, path: Path) -> str:
    """Return what to do about an unreadable directory; without read permission it may be intact.

    The error does not tell, since safetensors reports a file without permission as missing.
    """
    try:
        with suppress(FileNotFoundError):  # pruned meanwhile
            for file in path.iterdir():
                with file.open("rb") as opened:
                    opened.read(1)
    except OSError:
        return ADVICE["closed"]
    return ADVICE[kind]


def _has_damaged_base(path: Path, row: dict[str, Any] | Finding) -> bool:
    """Return whether an adapter's checkpoint is wrong because its base weights are damaged."""
    base = weight_files(path)[0].parent
    is_intact = isinstance(row, dict) and row["found_weights_hash"] == row["weights_hash"]
    if base == path or is_intact:
        return False
    from areal_flow.policy.models.hashing import hash_files

    try:
        return hash_files(*weight_files(base)) != read_checkpoint_state(base).weights_hash
    except _UNREADABLE:
        return True


def not_prepared(layout: RunLayout) -> bool:
    return not any(path.exists() for path in (layout.inputs, layout.steps, layout.weights))


def before_training(layout: RunLayout, recipe: Recipe) -> Finding:
    description = "not begun to train" if layout.steps.exists() else ""
    if layout.sft_rows.is_file():
        step = max(list_checkpoints(layout.sft_checkpoints), default=0)
        fine_tuning = f"fine-tuning at step {step:,} of {recipe.sft.num_steps:,}"
        description = "; ".join(filter(None, (fine_tuning, description)))
    what = (layout.steps.name, "a policy", description)
    return Finding("before-training", *what, ADVICE["before"], "note")


def broken_descriptions(layout: RunLayout) -> Iterator[Finding]:
    model = layout.model
    descriptions = (layout.state, model / "config.json", model / "tokenizer.json")
    for path in (*descriptions, layout.held_out_prompts):
        try:
            if path == layout.held_out_prompts:
                _validate_arrow(path)
            elif not isinstance(json.loads(path.read_text()), dict):
                yield unreadable(path.name, "not a JSON object")
        except _UNREADABLE as error:
            yield unreadable(path.name, error)


def changed_chat_template(layout: RunLayout) -> Iterator[Finding]:
    where = layout.chat_template.relative_to(layout.root).as_posix()
    if not layout.chat_template.exists():
        return
    try:
        recorded = json.loads(layout.chat_template.read_text())["sha256"]
        template = chat_template_of(layout.model)
    except (*_UNREADABLE, ModelError) as error:
        yield unreadable(where, error)
        return
    current = template.sha256 if template else "none"
    if current != recorded:
        yield Finding("chat-template", "model", recorded, current, ADVICE["file"])


def changed_inputs(layout: RunLayout, recorded: RunInputs) -> Iterator[Finding]:
    for name, recorded_hash in recorded.files.items():
        path = layout.root / name
        if path.is_file() and (current := file_hash(path)) != recorded_hash:
            expected = f"the hash {recorded_hash}, as recorded in {layout.inputs.name}"
            yield Finding("input-changed", name, expected, current, ADVICE["file"])


def leftovers(layout: RunLayout) -> Iterator[Finding]:
    description = "leftover of an interrupted write"
    for rule, pattern in (
        ("staged-weights", "weights/*/.staged-*"),
        ("partial-checkpoint", "checkpoints/.partial-*"),
        ("pruned-checkpoint", "checkpoints/.pruned-*"),
    ):
        # `Path.glob` raises if a directory is removed while it is listed.
        for where in sorted(glob(pattern, root_dir=layout.root)):  # noqa: PTH207
            yield Finding(
                rule, where, "a finished directory", description, ADVICE["harmless"], "note"
            )
    for path in (layout.trajectories, layout.steps, layout.evaluations):
        yield from _orphan_fragments(path)


def _weights_root(layout: RunLayout) -> Path:
    lease = newest_lease(layout.writers)
    return layout.weights_of(lease.writer_epoch if lease else 0)


def _checkpoint(layout: RunLayout, path: Path) -> dict[str, Any]:
    from areal_flow.policy.models.hashing import hash_files

    names = [file.name for file in _unchanged_model_files(layout)]
    _, different, missing = filecmp.cmpfiles(layout.model, path, names, shallow=False)
    return {
        "listed_step": int(path.name),
        **asdict(read_checkpoint_state(path)),
        "found_weights_hash": hash_files(*weight_files(path)),
        "found_optimizer_hash": hash_files(path / "optimizer.safetensors", without=(RNG_STATE,)),
        "other_files": ", ".join((*different, *missing)),
    }


def _unchanged_model_files(layout: RunLayout) -> list[Path]:
    """Return the run's model files that are as prepared; `changed_inputs` reports the others."""
    try:
        recorded = read_inputs(layout).files
    except RunError:
        return []
    hashes = {
        layout.root / name: recorded_hash
        for name, recorded_hash in recorded.items()
        if name.startswith(f"{layout.model.name}/")
    }
    return [file for file in hashes if file.is_file() and file_hash(file) == hashes[file]]


def _weights(reader: DirectoryReader, path: Path) -> dict[str, Any]:
    step = int(path.name)
    _, recorded, actual = reader.read(step)
    return {"step": step, "recorded_hash": recorded, "tensors_hash": actual}


def _validate_arrow(path: Path) -> None:
    with pa.memory_map(str(path)) as file:
        pa.ipc.open_file(file).read_all().validate(full=True)


def _orphan_fragments(path: Path) -> Iterator[Finding]:
    try:
        orphans = unreferenced_files(path) if path.is_dir() else []
    except ArealFlowError as error:
        yield unreadable(path.name, error)._replace(severity="note", advice=ADVICE["harmless"])
        return
    if orphans:
        description = f"{len(orphans)} never committed, the first is {Path(orphans[0]).name}"
        where, expected = f"{path.name}/data", "files of committed fragments"
        yield Finding("orphan-fragments", where, expected, description, ADVICE["harmless"], "note")


class VersionGone(Exception):
    """The version being read was cleaned up: the run commits faster than the audit reads."""


class Batch(NamedTuple):
    source: str
    rows: pa.Table


def scan(path: Path, where: str | None = None, *, since: int = 0) -> Iterator[Batch | Finding]:
    """Yield rows of the newest version in batches of about `BYTES_AT_ONCE`, or findings.

    Args:
        since: the commit order of the first row, in a dataset with stable row ids.
    """
    pending: list[Batch] = []
    for batch in _batches(path, where, since):
        if isinstance(batch, Finding):
            yield batch
            continue
        pending.append(batch)
        if sum(batch.rows.nbytes for batch in pending) >= BYTES_AT_ONCE:
            yield _joined(pending)
            pending = []
    if pending:
        yield _joined(pending)


def _batches(path: Path, where: str | None, since: int) -> Iterator[Batch | Finding]:
    try:
        with read_errors(path):
            dataset = open_dataset(path)
            fragments = dataset.get_fragments()
            if since:
                later = f"{COMMIT_ORDER} >= {since}"
                num_later = dataset.count_rows() - since
                fragments = newest_fragments(dataset, later, num_rows=num_later)
                where = conjunction(later, where)
    except ArealFlowError as error:
        yield unreadable(path.name, error)
        return
    rows_at_once = ROWS_AT_ONCE
    for fragment in fragments:
        source = f"{path.name}, fragment {fragment.fragment_id}"
        columns = [*fragment.schema.names, COMMIT_ORDER]
        try:
            with read_errors(path):
                for batch in fragment.to_batches(
                    columns=columns, filter=where, batch_size=rows_at_once, batch_readahead=2
                ):
                    yield Batch(source, pa.Table.from_batches([batch]))
                    rows_at_once = max(1, BYTES_AT_ONCE * len(batch) // max(1, batch.nbytes))
        except ArealFlowError as error:
            if not has_version(path, dataset.version):
                raise VersionGone(path.name) from error
            yield unreadable(source, error)


def _joined(batches: list[Batch]) -> Batch:
    first, last = batches[0].source, batches[-1].source
    source = first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"
    return Batch(source, pa.concat_tables([batch.rows for batch in batches]))


def check_schema(
    batch: Batch, model: type[pa_polars.DataFrameModel], *, kind: str
) -> tuple[list[Finding], pa.Table | None]:
    """Return a finding per broken rule, and the rows unless they are too broken for more checks."""
    stored, schema = batch.rows.drop_columns([COMMIT_ORDER]), arrow_schema(model)
    if unexpected := sorted(set(schema.names) ^ set(stored.schema.names)):
        broken = [f"missing or unknown columns: {', '.join(unexpected)}"]
    else:
        broken = violations(_complete(stored), model)
    expected, advice = f"rows of {model.__name__}", ADVICE[kind]
    findings = [Finding("schema", batch.source, expected, rule, advice) for rule in broken]
    try:
        rows = stored.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, KeyError):
        return findings, None
    if unexpected or any(_has_forbidden_nulls(rows[field.name], field) for field in schema):
        return findings, None
    return findings, rows.append_column(COMMIT_ORDER, batch.rows[COMMIT_ORDER])


def _complete(rows: pa.Table) -> pa.Table:
    """Return the rows whose tokens were not dropped."""
    if "loss_mask" in rows.column_names:
        with suppress(pa.ArrowException):  # of other types, which the schema does not allow
            return rows.filter(pc.invert(is_dropped(rows)))
    return rows


def _has_forbidden_nulls(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    return pa.types.is_list(field.type) and bool(pc.list_flatten(column).null_count)
