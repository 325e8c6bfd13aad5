"""Dask: a run's worker processes, what they hold, and the controller's protocols over tasks."""
