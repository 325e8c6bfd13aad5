"""Dask: worker processes, what lives in them, and the controller's protocols over tasks."""
