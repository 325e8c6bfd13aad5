"""Dask: the worker processes of a run, what they hold, and the controller's protocols over tasks."""
