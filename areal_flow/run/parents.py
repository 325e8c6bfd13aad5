"""The run that another one was forked from: noted in the child's run.json, found again by identity.

A child has copies of all that it needs: its parent may go on, be renamed, or be removed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from areal_flow.run.durable import replace_file
from areal_flow.run.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Parent:
    """The step of a run whose policy is version 0 of another one."""

    run_id: str
    """The parent's identity, which outlives its name."""
    name: str
    """What the parent was called then."""
    step: int
    weights_hash: str
    optimizer: str
    """`kept`, or why the optimizer began without a state."""

    def __str__(self) -> str:
        return f"step {self.step} of run {self.name}"


def record_parent(layout: RunLayout, parent: Parent) -> None:
    identity = json.loads(layout.identity.read_text())
    replace_file(layout.identity, json.dumps({**identity, "forked_from": asdict(parent)}))


def read_parent(layout: RunLayout) -> Parent | None:
    found = json.loads(layout.identity.read_text()).get("forked_from")
    return Parent(**found) if found else None


def find_parent(layout: RunLayout, parent: Parent) -> RunLayout | None:
    """Return where the parent is now among the child's neighbours, whatever it is called."""
    for identity in sorted(layout.root.parent.glob(f"*/{layout.identity.name}")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(identity.read_text())["run_id"] == parent.run_id:
                return RunLayout(identity.parent)
    return None
