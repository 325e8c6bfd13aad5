"""What an earlier audit found clean, so that the next one reads only what was written since.

It is recorded in the run directory, and used only while program, recipe, inputs and the last
verified row are the same.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout
from areal_flow.core.program import CODE_VERSION, git_commit
from areal_flow.log.dataset import open_dataset, read_errors
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.settled import NOTHING_SETTLED, SettledPast, past_from_json


@dataclass(frozen=True, slots=True)
class Verified:
    past: SettledPast = NOTHING_SETTLED
    evaluation_watermark: int = 0
    """All held-out answers below this commit order were verified."""
    identity: str = ""
    """Digest of what the verdict depends on beside the rows before: see `_identity`."""
    at: str = ""

    @property
    def first_step(self) -> int:
        """From which step on the ledger is read again: to continue its order and consumption."""
        return max(0, min(self.past.ledger_since, self.past.step))

    def as_json(self) -> dict[str, Any] | None:
        if self.past.step < 0:
            return None
        return {"step": self.past.step, "trajectories": self.past.watermark, "at": self.at}


def read_verified(layout: RunLayout) -> Verified:
    """Return what was verified; nothing if it is not of this run as it is, or cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, ArealFlowError):
        record = json.loads(layout.verified.read_text())
        verified = Verified(**{**record, "past": past_from_json(record["past"])})
        with read_errors(layout.steps):
            ledger = LedgerReader(layout)
            num_trajectories = open_dataset(layout.trajectories).count_rows()
            if verified.past.is_of(ledger, num_trajectories=num_trajectories) and (
                verified.identity == _identity(layout, ledger, verified.past.step)
            ):
                return verified
    return Verified()


def record_verified(layout: RunLayout, past: SettledPast, *, evaluation_watermark: int) -> None:
    """Record a clean audit; not in a directory that this user may not write."""
    with suppress(OSError, ArealFlowError), read_errors(layout.steps):
        identity = _identity(layout, LedgerReader(layout), past.step)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        verified = Verified(past, evaluation_watermark, identity, at)
        replace_file(layout.verified, json.dumps(asdict(verified)) + "\n")


def forget_verified(layout: RunLayout) -> None:
    """Let the next audit read everything: this one found damage, maybe in what was verified."""
    with suppress(OSError):
        layout.verified.unlink()


def _identity(layout: RunLayout, ledger: LedgerReader, step: int) -> str:
    """Return a digest of the program, the run's recipe and inputs, and the row of a step."""
    row = json.dumps(ledger.row(step), sort_keys=True, default=str)
    files = [path.read_text() for path in (layout.config, layout.inputs)]
    return sha256_hex("\n".join([CODE_VERSION, git_commit(), *files, row]), 32)
