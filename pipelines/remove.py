"""Removes a run with all that a registry has of it: first the registry's entries, then the files.

So a run whose registry cannot be reached is still there, and no entry is left that leads nowhere.
"""

from __future__ import annotations

import shutil

from areal_flow.config import load_recipe
from areal_flow.errors import RunError
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import hold_lease, is_held, newest_lease
from areal_flow.tracking.registry import untrack
from areal_flow.weights.shared_memory import free_segments


def check_unheld(layout: RunLayout) -> None:
    lease = newest_lease(layout.writers)
    if lease and is_held(layout.writers, lease.writer_epoch):
        raise RunError(f"run {layout.name} is held by {lease}: stop it first; nothing was removed")


def remove_run(layout: RunLayout) -> int:
    """Remove a run that no driver holds; return how many model versions it had.

    The directory is renamed first: one that is half removed must not look like a run.
    """
    check_unheld(layout)
    with hold_lease(layout.writers):
        num_versions = untrack(layout, load_recipe(layout.config))
        for root in layout.weights.glob("[0-9]*"):
            free_segments(root)
        removed = layout.root.rename(layout.root.with_name(f".removed-{layout.name}"))
        shutil.rmtree(removed)
    return num_versions
