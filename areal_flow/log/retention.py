"""Drops the tokens of trajectories that old steps consumed; the rest of each row stays.

A fragment is written again without them once all its rows were consumed. Lengths, masks and
versions stay in `loss_mask` and `version_spans`: a row with a mask and no tokens was dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from lance import LanceDataset, LanceOperation
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments

from areal_flow.core.layout import RunLayout
from areal_flow.log.codec import DROPPED_COLUMNS, TRAJECTORIES
from areal_flow.log.dataset import COMMIT_ORDER, dataset_uri, open_dataset
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.maintenance import MAX_REWRITES, Maintenance


class _Span(NamedTuple):
    """Places of a fragment's oldest and newest row in the order of commits."""

    first: int
    last: int


@dataclass(slots=True)
class Retention:
    layout: RunLayout
    _spans: dict[int, _Span | None] = field(default_factory=dict)
    """By fragment; None where it has no tokens to drop."""

    def drop_tokens(self, maintenance: Maintenance, *, until: int) -> int:
        """Drop tokens of rows that steps up to `until` consumed; return the number of rows.

        A few fragments a call. Call it while nothing else rewrites fragments.
        """
        ledger = LedgerReader(self.layout)
        steps = ledger.table(["step", "trajectory_watermark"])
        steps = steps.filter(pc.less_equal(steps["step"], until))
        dataset = open_dataset(self.layout.trajectories)
        num_committed = pc.max(steps["trajectory_watermark"]).as_py() or 0
        old = list(islice(self._with_tokens(dataset, num_committed), MAX_REWRITES))
        if not old:
            return 0
        first = min(span.first for _, span in old)
        since = steps.filter(pc.greater(steps["trajectory_watermark"], first))["step"]
        consumed = _consumed(ledger, pc.min(since).as_py(), until)
        groups = [
            LanceOperation.RewriteGroup([fragment.metadata], [self._without_tokens(fragment)])
            for fragment, _ in old
            if pc.all(pc.is_in(_ids(fragment), value_set=consumed)).as_py()
        ]
        if groups:
            with maintenance.commit():
                rewrite = LanceOperation.Rewrite(groups, [])
                LanceDataset.commit(dataset, rewrite, read_version=dataset.version)
        return sum(fragment.physical_rows for group in groups for fragment in group.new_fragments)

    def _with_tokens(
        self, dataset: LanceDataset, num_committed: int
    ) -> Iterator[tuple[LanceFragment, _Span]]:
        """Yield fragments with tokens whose rows are all among the first `num_committed`."""
        fragments = {fragment.fragment_id: fragment for fragment in dataset.get_fragments()}
        self._spans = {each: span for each, span in self._spans.items() if each in fragments}
        for identifier, fragment in fragments.items():
            if identifier not in self._spans:
                self._spans[identifier] = _span_with_tokens(fragment)
            span = self._spans[identifier]
            if span is not None and span.last < num_committed:
                yield fragment, span

    def _without_tokens(self, fragment: LanceFragment) -> FragmentMetadata:
        """Write a fragment's rows without tokens; they keep their place in the order of commits."""
        rows = fragment.to_table(
            columns=[n for n in TRAJECTORIES.names if n not in DROPPED_COLUMNS]
        )
        for name in DROPPED_COLUMNS:
            empty = pa.array([[]] * len(rows), TRAJECTORIES.field(name).type)
            rows = rows.append_column(TRAJECTORIES.field(name), empty)
        uri = dataset_uri(self.layout.trajectories)
        (written,) = write_fragments(
            rows.select(TRAJECTORIES.names), uri, schema=TRAJECTORIES, mode="append"
        )
        row_ids = fragment.metadata.to_json()["row_id_meta"]
        return FragmentMetadata.from_json(json.dumps({**written.to_json(), "row_id_meta": row_ids}))


def _span_with_tokens(fragment: LanceFragment) -> _Span | None:
    ends = fragment.take([0, fragment.physical_rows - 1], columns=["output_tokens"])
    if pc.max(pc.list_value_length(ends["output_tokens"])).as_py() == 0:
        return None
    places = fragment.to_table(columns=[COMMIT_ORDER])[COMMIT_ORDER]
    return _Span(pc.min(places).as_py(), pc.max(places).as_py())


def _ids(fragment: LanceFragment) -> pa.ChunkedArray:
    return fragment.to_table(columns=["trajectory_id"])["trajectory_id"]


def _consumed(ledger: LedgerReader, since: int, until: int) -> pa.Array:
    """Return the ids of the trajectories that these steps trained or discarded."""
    steps = ledger.table(["step", "trajectory_ids", "discarded"], since=since)
    steps = steps.filter(pc.less_equal(steps["step"], until))
    discarded = pc.struct_field(pc.list_flatten(steps["discarded"]), "trajectory_id")
    trained = pc.list_flatten(steps["trajectory_ids"])
    return pa.concat_arrays([*trained.chunks, *discarded.chunks])
