"""Turns questions into a memory-mapped table of tokenised prompts, read by submission index."""
