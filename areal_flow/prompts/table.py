"""Prompts by submission index, from a memory-mapped Arrow file: bounded memory, any size.

The cursor is the submission index alone: source, epoch and position follow from it, and the order
of each epoch from the run's seed. The file says in its schema how its sources are mixed.
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

from areal_flow.errors import PromptError
from areal_flow.prompts.mixture import BLOCK, Mixture
from areal_flow.prompts.rows import take_right_answer
from areal_flow.types import Prompt

QUOTAS = b"areal_flow.quotas"
"""Of each source by name, as JSON, in a prepared file's schema; a file without is one source."""
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
    """The columns of a prompt's row but its answer, read where they are first asked for.

    Sent to another process it is the row's place: a row may have megabytes of tests.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._place = path, index

    def __reduce__(self) -> tuple[type[RowColumns], tuple[Path, int]]:
        return RowColumns, self._place

    @cached_property
    def _columns(self) -> dict[str, Any]:
        path, index = self._place
        columns: dict[str, Any] = json.loads(_open(path)["metadata"][index].as_py())
        take_right_answer(columns)
        return columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class PromptTable:
    """A prepared prompt file; each source is read in a seeded order, reshuffled every epoch."""

    def __init__(self, path: Path, *, seed: int) -> None:
        self.path = path
        self.seed = seed
        self._table = _open(path)
        if not len(self._table):
            raise PromptError(f"{path} holds no prompts")
        quotas = json.loads((self._table.schema.metadata or {}).get(QUOTAS, ONE_SOURCE))
        self._mixture = Mixture(quotas, seed=seed)
        of_row = self._table["source"]
        self._rows = [
            np.flatnonzero(pc.equal(of_row, name)) if name else np.arange(len(of_row))
            for name in quotas
        ]
        firsts = (int(rows[0]) for rows in self._rows)
        self.first_rows = dict(zip(quotas, firsts, strict=True))
        """The place of each source's first row in the file."""
        self._permutation = lru_cache(maxsize=2 * len(quotas))(self._make_permutation)

    def __len__(self) -> int:
        return len(self._table)

    def prompt_at(self, submission_index: int) -> Prompt:
        """Return the prompt of a submission.

        The i-th of a source of n prompts is at position `i mod n` of its epoch `i div n`.
        """
        return self.row(self._place_of(submission_index))

    def rows_at(self, submission_indices: Sequence[int]) -> pa.Table:
        places = [self._place_of(submission_index) for submission_index in submission_indices]
        return self._table.take(pa.array(places, pa.int64()))

    def row(self, index: int) -> Prompt:
        (row,) = self._table.slice(index, 1).drop_columns(["prompt_tokens"]).to_pylist()
        return Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            answer=take_right_answer(json.loads(row["metadata"])),
            difficulty=row["difficulty"],
            tokens=self._table["prompt_tokens"][index].values.to_numpy(),
            metadata=RowColumns(self.path.resolve(), index),
            source=row["source"],
        )

    def rows(self, limit: int | None = None) -> list[Prompt]:
        return [self.row(index) for index in range(len(self))[:limit]]

    def _place_of(self, submission_index: int) -> int:
        source, drawn = self._mixture.draw(submission_index)
        epoch, position = divmod(drawn, len(self._rows[source]))
        return int(self._permutation(epoch, source)[position])

    def _make_permutation(self, epoch: int, source: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, source]).permutation(self._rows[source])
