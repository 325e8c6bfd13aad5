"""Runs in a browser, live: curves, groups token by token, comparisons, lineage, export."""
