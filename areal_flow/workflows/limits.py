"""How long an episode may take, whatever its workflow: one setting and one rule."""

from __future__ import annotations

from pydantic import Field

from areal_flow.settings import Settings
from areal_flow.workflows.context import EpisodeContext


class TimedWorkflow(Settings):
    """A workflow whose episodes end in time."""

    max_seconds: float = Field(600.0, gt=0)
    """How long an episode may take; then what it has is what there is, cut."""

    def time_limit(self, context: EpisodeContext) -> str:
        """Return the limit that an episode has reached before its next turn; empty if none."""
        is_late = context.elapsed_s() >= self.max_seconds
        return f"workflow.max_seconds ({self.max_seconds:g})" if is_late else ""
