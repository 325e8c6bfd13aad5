"""Prompts by submission index, from a memory-mapped Arrow file: bounded memory, any size.

The submission index is the only cursor: source, epoch and position follow from it, and the order of
each epoch follows from the run's seed. The file's schema says how its sources are mixed.

A block of `BLOCK` submissions, shuffled by itself, holds the share of each source, rounded up or
down; a cycle of blocks holds the exact share. A source of a thousandth is in one of ten blocks.

Letters: B blocks of a cycle, P places in a block, S sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import PromptError
from areal_flow.core.types import Prompt
from areal_flow.rollout.prompts.rows import pop_reference_answer

BLOCK = 100
CYCLE = 100_000
_STRIDE = 617
"""Between blocks of a cycle of 1,000, by the golden ratio: keeps rare sources far apart."""
_BLOCK_SEED = 0x6D6978
"""Distinguishes these seeds from those of the sources' own orders."""
QUOTAS = b"areal_flow.quotas"
"""Schema key of a prepared file: JSON of the quota of each source; absent for a single source."""
ONE_SOURCE = json.dumps({"": BLOCK})


def _open(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise PromptError(f"expected prepared prompts at {path}: {error}") from None


@cache
def num_prompts(path: Path) -> int:
    return len(_open(path)) if path.exists() else 0


class RowColumns(Mapping[str, Any]):
    """The columns of a prompt's row without its answer, read on first use since they may be large.

    Pickled as the row's place.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._place = path, index

    def __reduce__(self) -> tuple[type[RowColumns], tuple[Path, int]]:
        return RowColumns, self._place

    @cached_property
    def _columns(self) -> dict[str, Any]:
        path, index = self._place
        columns: dict[str, Any] = json.loads(_open(path)["metadata"][index].as_py())
        pop_reference_answer(columns)
        return columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of each source in a cycle, by largest remainders, at least one each."""
    total = sum(weights.values())
    exact = {name: CYCLE * weight / total for name, weight in weights.items()}
    counts = {name: max(1, int(share)) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: max(0, CYCLE - sum(counts.values()))]:
        counts[name] += 1
    while sum(counts.values()) > CYCLE:  # small shares were raised to one
        counts[max(counts, key=lambda name: counts[name])] -= 1
    return counts


class Mixture:
    """Draws from several sources, numbered in the order of their quotas."""

    def __init__(self, quotas: Mapping[str, int], *, seed: int) -> None:
        self._quotas = np.array([*quotas.values()])
        self._seed = seed
        # The cycle's places, sorted by source, are dealt to the blocks in turn.
        num_blocks = int(self._quotas.sum()) // BLOCK
        sources_PB = np.repeat(np.arange(len(quotas)), self._quotas).reshape(BLOCK, num_blocks)
        self._sources_BP = sources_PB.T[np.arange(num_blocks) * _STRIDE % num_blocks]
        counts_BS = np.array([np.bincount(p, minlength=len(quotas)) for p in self._sources_BP])
        self._num_before_BS = np.cumsum(counts_BS, axis=0) - counts_BS
        self._order = lru_cache(maxsize=2)(self._make_order)

    def draw(self, submission_index: int) -> tuple[int, int]:
        """Return the source that a submission draws from, and the number of its earlier draws."""
        block, place = divmod(submission_index, BLOCK)
        cycle, block_of_cycle = divmod(block, len(self._sources_BP))
        order_P = self._order(block)
        source = int(order_P[place])
        num_before = cycle * self._quotas[source] + self._num_before_BS[block_of_cycle, source]
        return source, int(num_before + (order_P[:place] == source).sum())

    def _make_order(self, block: int) -> np.ndarray:
        sources_P = self._sources_BP[block % len(self._sources_BP)]
        return np.random.default_rng([self._seed, block, _BLOCK_SEED]).permutation(sources_P)


class PromptTable:
    """A prepared prompt file; each source is read in a seeded order, reshuffled every epoch."""

    def __init__(self, path: Path, *, seed: int) -> None:
        self.path = path
        self.seed = seed
        self._absolute_path = path.resolve()
        self._table = _open(path)
        if not len(self._table):
            raise PromptError(f"{path} holds no prompts")
        quotas = json.loads((self._table.schema.metadata or {}).get(QUOTAS, ONE_SOURCE))
        self._mixture = Mixture(quotas, seed=seed)
        row_sources = self._table["source"]
        self._rows = [
            np.flatnonzero(pc.equal(row_sources, name)) if name else np.arange(len(row_sources))
            for name in quotas
        ]
        firsts = (int(rows[0]) for rows in self._rows)
        self.first_rows = dict(zip(quotas, firsts, strict=True))
        """Index of each source's first row in the file."""
        self._permutation = lru_cache(maxsize=2 * len(quotas))(self._make_permutation)

    def __len__(self) -> int:
        return len(self._table)

    def prompt_at(self, submission_index: int) -> Prompt:
        """Return the prompt of a submission.

        The i-th of a source of n prompts is at position `i mod n` of its epoch `i div n`.
        """
        return self.row(self._row_index(submission_index))

    def rows_at(self, submission_indices: Sequence[int]) -> pa.Table:
        indices = [self._row_index(submission_index) for submission_index in submission_indices]
        return self._table.take(pa.array(indices, pa.int64()))

    def row(self, index: int) -> Prompt:
        names = ("prompt_id", "prompt", "metadata", "difficulty", "source")
        row = {name: self._table[name][index].as_py() for name in names}
        return Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            answer=pop_reference_answer(json.loads(row["metadata"])),
            difficulty=row["difficulty"],
            tokens=self._table["prompt_tokens"][index].values.to_numpy(),
            metadata=RowColumns(self._absolute_path, index),
            source=row["source"],
        )

    def rows(self, limit: int | None = None) -> list[Prompt]:
        return [self.row(index) for index in range(len(self))[:limit]]

    def _row_index(self, submission_index: int) -> int:
        source, num_earlier = self._mixture.draw(submission_index)
        epoch, position = divmod(num_earlier, len(self._rows[source]))
        return int(self._permutation(epoch, source)[position])

    def _make_permutation(self, epoch: int, source: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, source]).permutation(self._rows[source])
