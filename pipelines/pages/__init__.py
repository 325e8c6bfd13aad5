"""Pages about runs: the report, which loads nothing, and the live page of `areal-flow view`."""
