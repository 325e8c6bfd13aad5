"""Prompts and weights in, completions with versions and log-probabilities out."""
