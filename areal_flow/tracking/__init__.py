"""Where a run's numbers are shown: sinks that are filled from the ledger."""
