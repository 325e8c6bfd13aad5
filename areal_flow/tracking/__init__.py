"""Shows a run's numbers elsewhere: sinks that are filled from its ledger."""

from areal_flow.tracking.registry import track

__all__ = ["track"]
