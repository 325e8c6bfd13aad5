"""Makes the mutants of a file: mutmut's operators, and one that removes a statement.

Bodies of functions only; annotations, decorators, log lines and messages stay as they are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from itertools import accumulate
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators


@dataclass(frozen=True)
class Mutant:
    """A module with one break. The identifier follows from file and change, not from the line."""

    identifier: str
    file: str
    line: int
    diff: str
    source: str


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield every mutant of a file that compiles."""
    original = Path(file).read_text()
    visitor = _Mutations()
    MetadataWrapper(cst.parse_module(original), unsafe_skip_copy=True).visit(visitor)
    lines = original.splitlines(keepends=True)
    starts = list(accumulate((len(line) for line in lines), initial=0))
    times_seen: Counter[str] = Counter()
    for span, code in visitor.mutations:
        first, last = (starts[end.line - 1] + end.column for end in (span.start, span.end))
        source = original[:first] + code + original[last:]
        try:
            compile(source, file, "exec")
        except SyntaxError:
            continue
        changes = list(unified_diff(original.splitlines(), source.splitlines(), n=0, lineterm=""))
        diff = "\n".join(change for change in changes[2:] if not change.startswith("@@"))
        times_seen[diff] += 1
        key = f"{file}\n{diff}\n{times_seen[diff]}"
        yield Mutant(
            hashlib.sha256(key.encode()).hexdigest()[:12], file, span.start.line, diff, source
        )


class _Mutations(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (WhitespaceInclusivePositionProvider,)

    def __init__(self) -> None:
        self.mutations: list[tuple[CodeRange, str]] = []
        self._depth = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._depth += isinstance(node, cst.FunctionDef)
        if isinstance(node, cst.Annotation | cst.Decorator) or _is_for_people(node):
            return False
        for kind, mutate in OPERATORS if self._depth else ():
            if isinstance(node, kind):
                span = self.get_metadata(WhitespaceInclusivePositionProvider, node)
                self.mutations += [(span, _code_of(mutated)) for mutated in mutate(node)]
        return not isinstance(node, cst.Raise)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._depth -= isinstance(original_node, cst.FunctionDef)


def _code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _is_for_people(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Expr):
        return _code_of(node).startswith("logger.")
    return isinstance(node, cst.SimpleString) and " " in node.value


def _remove_statement(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Raise) or isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


OPERATORS = [*mutation_operators, (cst.Expr, _remove_statement), (cst.Raise, _remove_statement)]
