"""The life of a run directory: created or resumed, held by one driver, left with a state.

The datasets' schema version is checked here; their rows are not read.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from areal_flow.config import Recipe, dump_recipe
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import RunError
from areal_flow.core.layout import SCHEMA_VERSION, RunLayout
from areal_flow.core.lease import Writer, hold_lease, is_held, newest_lease

logger = logging.getLogger(__name__)

State = Literal["running", "finished", "stopped", "failed", "crashed"]


@dataclass(frozen=True, slots=True)
class RunState:
    state: State = "running"
    reason: str = ""
    driven_s: float = 0.0
    """Wall time of earlier drivers' lives, as far as they could record it."""


def create_run(layout: RunLayout, recipe: Recipe, *, recipe_name: str = "") -> None:
    if layout.root.exists():
        raise RunError(
            f"run {layout.name!r} exists already in {layout.root.parent}: choose another --name, "
            f"or continue it with --resume {layout.name}"
        )
    layout.root.mkdir(parents=True)
    with removed_on_failure(layout):
        write_identity(layout, recipe_name=recipe_name, num_steps=recipe.num_steps)
        layout.config.write_text(dump_recipe(recipe))


@contextmanager
def removed_on_failure(layout: RunLayout) -> Iterator[None]:
    """Remove a new run's directory if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise


def write_identity(layout: RunLayout, *, recipe_name: str = "", num_steps: int = 0) -> None:
    identity = {"schema_version": SCHEMA_VERSION, "run_id": uuid4().hex, "recipe": recipe_name}
    layout.identity.write_text(json.dumps({**identity, "first_num_steps": num_steps}))


def recipe_name_of(layout: RunLayout) -> str:
    return str(json.loads(layout.identity.read_text()).get("recipe", ""))


def first_num_steps(layout: RunLayout) -> int:
    """Return the `num_steps` a run was created with, which a resume may change; 0 if unrecorded."""
    return int(json.loads(layout.identity.read_text()).get("first_num_steps", 0))


def check_schema_version(layout: RunLayout) -> str:
    """Return the identity of a run, which this version of areal-flow must be able to read."""
    version: Any = "none"
    run_id = ""
    try:
        identity = json.loads(layout.identity.read_text())
        version, run_id = identity["schema_version"], str(identity["run_id"])
    except FileNotFoundError:
        pass  # version 1 had none
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{layout.identity} is damaged: expected schema_version and run_id as JSON, found "
            f"{type(error).__name__}: {error}; restore it from a copy"
        ) from None
    if version != SCHEMA_VERSION:
        raise RunError(
            f"expected schema version {SCHEMA_VERSION} in {layout.identity}, found {version}: "
            f"read run {layout.name} with the version of areal-flow that wrote it"
        )
    return run_id


def find_run(runs: Path, reference: str) -> RunLayout:
    """Return a run by its name in `runs`, or by its directory; a damaged one by its ledger."""
    for root in (runs / reference, Path(reference)):
        layout = RunLayout(root.resolve())
        if layout.config.is_file() or layout.steps.exists():
            check_schema_version(layout)
            return layout
    names = ", ".join(run.name for run in list_runs(runs)) or "none"
    raise RunError(f"expected a run named {reference!r} in {runs}, found: {names}")


@contextmanager
def hold_run(layout: RunLayout, *, take_over: bool = False) -> Iterator[Writer]:
    with hold_lease(layout.writers, take_over=take_over) as writer:
        driven = read_state(layout).driven_s
        _write_state(layout, RunState("running", driven_s=driven))
        yield writer


def leave_run(
    layout: RunLayout, writer: Writer, state: State, *, seconds: float, reason: str = ""
) -> None:
    """Record how a run ended and how long this driver had it; a full disk is only logged."""
    if writer.is_superseded:
        return  # the state is another driver's
    driven = read_state(layout).driven_s + seconds
    try:
        _write_state(layout, RunState(state, reason, driven))
    except OSError as error:
        logger.warning("the end of %s could not be recorded: %s", layout.name, error)


def read_state(layout: RunLayout) -> RunState:
    try:
        return RunState(**json.loads(layout.state.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return RunState()


def observed_state(layout: RunLayout) -> RunState:
    """Return the state; a run recorded as running that nobody holds has crashed."""
    recorded, lease = read_state(layout), newest_lease(layout.writers)
    held = lease is not None and is_held(layout.writers, lease.writer_epoch)
    if recorded.state == "running" and not held:
        return replace(recorded, state="crashed")
    return recorded


def _write_state(layout: RunLayout, state: RunState) -> None:
    replace_file(layout.state, json.dumps(asdict(state)))


def list_runs(runs: Path) -> list[RunLayout]:
    layouts = []
    for entry in sorted(runs.iterdir()) if runs.is_dir() else ():
        layout = RunLayout(entry.resolve())
        if layout.config.is_file():
            try:
                check_schema_version(layout)
                layouts.append(layout)
            except RunError as error:
                logger.warning("%s", error)
    return layouts


@dataclass(frozen=True, slots=True)
class Parent:
    """The step whose policy is version 0 of a fork. The fork does not need its parent any more."""

    run_id: str
    """The parent's identity, which outlives its name."""
    name: str
    """The parent's name when it was forked."""
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
    parent = json.loads(layout.identity.read_text()).get("forked_from")
    return Parent(**parent) if parent else None


def find_parent(layout: RunLayout, parent: Parent) -> RunLayout | None:
    """Return the parent if it is beside the child, under any name."""
    for identity in sorted(layout.root.parent.glob(f"*/{layout.identity.name}")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(identity.read_text())["run_id"] == parent.run_id:
                return RunLayout(identity.parent)
    return None
