"""Trajectory rows in, the log without its tokens out: what rules need of a million trajectories.

Letters: N trajectories, S version spans of all of them, T tokens of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.types import VersionSpan


@dataclass(frozen=True, slots=True)
class Log:
    """Trajectories in the order they were read, columns as arrays."""

    ids: list[str]
    commit_order_N: np.ndarray
    submission_index_N: np.ndarray
    num_tokens_N: np.ndarray
    reward_N: np.ndarray
    """NaN where the verifier failed."""
    finite_N: np.ndarray
    """Whether every behaviour log-probability is a number."""
    first_span_N: np.ndarray
    num_spans_N: np.ndarray
    version_S: np.ndarray
    length_S: np.ndarray
    chosen_S: np.ndarray
    """Tokens of the span that the policy chose: those that `loss_mask` keeps."""
    rows: dict[str, int] = field(default_factory=dict)
    """Where each id is; the first commit of an id wins."""

    def __len__(self) -> int:
        return len(self.ids)

    def spans(self, row: int) -> list[VersionSpan]:
        """Return a trajectory's version spans."""
        return self._spans(row, self.length_S)

    def chosen_spans(self, row: int) -> list[VersionSpan]:
        """Return a trajectory's version spans, counting the tokens that may be trained."""
        return self._spans(row, self.chosen_S)

    def newest_version(self, row: int) -> int:
        """Return the newest version that sampled a token, -1 if there is none."""
        return max((version for version, length in self.spans(row) if length), default=-1)

    def rows_of(self, identifiers: Iterable[str]) -> list[int]:
        """Return where these trajectories are; unknown ones are left out."""
        return [self.rows[identifier] for identifier in identifiers if identifier in self.rows]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the completion tokens of these trajectories together."""
        return int(self.num_tokens_N[rows].sum()) if rows else 0

    def _spans(self, row: int, lengths_S: np.ndarray) -> list[VersionSpan]:
        first = int(self.first_span_N[row])
        last = first + int(self.num_spans_N[row])
        versions, lengths = self.version_S[first:last].tolist(), lengths_S[first:last].tolist()
        return [VersionSpan(*span) for span in zip(versions, lengths, strict=True)]


def log_of(table: pa.Table) -> Log:
    """Return rows of the trajectory schema, with `_rowid`, as a log."""
    version_S, length_S, num_spans_N = _spans_of(table["version_spans"])
    logprobs_T = pc.list_flatten(table["behavior_logprobs"]).to_numpy()
    lengths_N = _lengths(table["behavior_logprobs"])
    owner_T = np.repeat(np.arange(len(table)), lengths_N)
    finite_N = np.ones(len(table), bool)
    finite_N[owner_T[~np.isfinite(logprobs_T)]] = False
    return Log(
        ids=table["trajectory_id"].to_pylist(),
        commit_order_N=table["_rowid"].to_numpy().astype(np.int64),
        submission_index_N=table["submission_index"].to_numpy(),
        num_tokens_N=_lengths(table["output_tokens"]),
        reward_N=table["reward"].cast(pa.float64()).to_numpy(),
        finite_N=finite_N,
        first_span_N=_starts(num_spans_N),
        num_spans_N=num_spans_N,
        version_S=version_S,
        length_S=length_S,
        chosen_S=_chosen(table["loss_mask"], length_S, num_spans_N),
    )


def join_logs(parts: Sequence[Log]) -> Log:
    """Return several logs as one, with its ids findable."""
    ids = [identifier for part in parts for identifier in part.ids]
    rows: dict[str, int] = {}
    for row, identifier in enumerate(ids):
        rows.setdefault(identifier, row)
    num_spans_N = _joined(parts, "num_spans_N")
    return Log(
        ids=ids,
        commit_order_N=_joined(parts, "commit_order_N"),
        submission_index_N=_joined(parts, "submission_index_N"),
        num_tokens_N=_joined(parts, "num_tokens_N"),
        reward_N=_joined(parts, "reward_N"),
        finite_N=_joined(parts, "finite_N").astype(bool),
        first_span_N=_starts(num_spans_N),
        num_spans_N=num_spans_N,
        version_S=_joined(parts, "version_S"),
        length_S=_joined(parts, "length_S"),
        chosen_S=_joined(parts, "chosen_S"),
        rows=rows,
    )


def repeated_ids(log: Log) -> Iterator[str]:
    """Yield each id that stands in the log more than once, as often as it is too many."""
    for row, identifier in enumerate(log.ids):
        if log.rows[identifier] != row:
            yield identifier


def _joined(parts: Sequence[Log], name: str) -> np.ndarray:
    arrays = [getattr(part, name) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)[: len(lengths)]


def _spans_of(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    spans_S = pc.list_flatten(column)
    version_S = pc.struct_field(spans_S, "version").to_numpy().astype(np.int64)
    length_S = pc.struct_field(spans_S, "length").to_numpy().astype(np.int64)
    return version_S, length_S, _lengths(column)


def _chosen(
    loss_mask: pa.ChunkedArray, length_S: np.ndarray, num_spans_N: np.ndarray
) -> np.ndarray:
    """Count the kept tokens of each span; spans that do not cover their mask count in full."""
    owner_S = np.repeat(np.arange(len(num_spans_N)), num_spans_N)
    covered_N = np.bincount(owner_S, weights=length_S, minlength=len(num_spans_N))
    if not np.array_equal(covered_N, _lengths(loss_mask)):
        return length_S
    mask_T = pc.list_flatten(loss_mask).to_numpy().astype(np.int64)
    kept = np.concatenate([[0], np.cumsum(mask_T)])
    ends_S = np.cumsum(length_S)
    return kept[ends_S] - kept[ends_S - length_S]  # type: ignore[no-any-return]
