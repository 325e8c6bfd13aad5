"""The blocks of docs/cookbook.md as code: a setup, and by title an answer in pandas and in SQL."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.markdown import DOCS, blocks

COOKBOOK = DOCS / "cookbook.md"


@dataclass(frozen=True)
class Question:
    """One section; both blocks assign their answer to the same name, last."""

    title: str
    pandas: str
    duckdb: str

    @property
    def answer(self) -> str:
        names = {_last_assigned(block) for block in (self.pandas, self.duckdb)}
        assert len(names) == 1, f"{self.title}: the two blocks answer different names: {names}"
        return names.pop()


def setup_block() -> str:
    """Return what runs before every question."""
    return blocks(COOKBOOK.read_text().split("\n## ")[0], "python")[0]


def questions() -> list[Question]:
    """Return the sections of the cookbook.

    A section that has not exactly two blocks of code fails.
    """
    parsed = []
    for section in COOKBOOK.read_text().split("\n## ")[1:]:
        in_pandas, in_duckdb = blocks(section, "python")
        parsed.append(Question(section.splitlines()[0], in_pandas, in_duckdb))
    return parsed


def _last_assigned(block: str) -> str:
    target = [node for node in ast.parse(block).body if isinstance(node, ast.Assign)][-1].targets[0]
    assert isinstance(target, ast.Name)
    return target.id
