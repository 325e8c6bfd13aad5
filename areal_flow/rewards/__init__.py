"""Completions in, scores out. Runs on reward workers; knows nothing of policies or steps."""
