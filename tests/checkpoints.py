"""Checkpoints without tensors, for tests of a run directory."""

from __future__ import annotations

import json
from dataclasses import asdict

from areal_flow.core.layout import RunLayout
from areal_flow.policy.checkpoints import CheckpointState, checkpoint_path


def write_fake_checkpoint(layout: RunLayout, step: int, *, weights_hash: str) -> None:
    """Write a complete checkpoint's description."""
    path = checkpoint_path(layout.checkpoints, step)
    path.mkdir(parents=True)
    state = CheckpointState(
        step=step,
        weights_hash=weights_hash,
        optimizer_hash="o",
        next_submission_index=0,
        config_hash="config",
    )
    (path / "state.json").write_text(json.dumps(asdict(state)))
